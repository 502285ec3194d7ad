//! Pearson's chi-square test.

/// Probability of a chi-square statistic at least as large as that of `counts`, if `expected` are
/// the probabilities of the cells. Cells that expect fewer than ten draws are pooled; a draw in a
/// cell of probability 0 refutes at once.
pub(crate) fn p_value(counts: &[u64], expected: &[f64]) -> f64 {
    let draws = counts.iter().sum::<u64>() as f64;
    let mass: f64 = expected.iter().sum();
    let (mut statistic, mut cells) = (0.0, 0);
    let mut pool = (0.0, 0.0);
    let mut add = |count: f64, expected: f64| {
        statistic += (count - expected) * (count - expected) / expected;
        cells += 1;
    };
    for (&count, &probability) in counts.iter().zip(expected) {
        let (count, expected) = (count as f64, draws * probability / mass);
        if expected == 0.0 {
            if count > 0.0 {
                return 0.0;
            }
        } else if expected < 10.0 {
            pool = (pool.0 + count, pool.1 + expected);
        } else {
            add(count, expected);
        }
    }
    if pool.1 > 0.0 {
        add(pool.0, pool.1);
    }
    gamma_upper(f64::from(cells - 1) / 2.0, statistic / 2.0)
}

/// The regularised upper incomplete gamma function Q(a, x), by its series or its continued fraction
/// (Abramowitz and Stegun, 6.5.29 and 6.5.31).
fn gamma_upper(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let mut term = 1.0 / a;
        let mut sum = term;
        let mut n = a;
        while term > sum * 1e-15 {
            n += 1.0;
            term *= x / n;
            sum += term;
        }
        return 1.0 - scale * sum;
    }
    // Lentz's algorithm.
    let mut b = x + 1.0 - a;
    let mut c = f64::MAX;
    let mut d = 1.0 / b;
    let mut fraction = d;
    for i in 1..10_000 {
        let i = f64::from(i);
        let an = -i * (i - a);
        b += 2.0;
        d = 1.0 / (an * d + b);
        c = b + an / c;
        fraction *= d * c;
        if (d * c - 1.0).abs() < 1e-14 {
            break;
        }
    }
    scale * fraction
}

/// Stirling's series after moving the argument up.
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift += x.ln();
        x += 1.0;
    }
    let square = x * x;
    let series = (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / (1260.0 * square)) / square) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

#[test]
fn tail_probabilities_are_those_of_printed_tables() {
    // Critical values at 5 %, 1 % and 0.1 % (Abramowitz and Stegun, table 26.8).
    for (freedom, statistic, p) in [
        (1.0, 3.84146, 0.05),
        (4.0, 13.2767, 0.01),
        (10.0, 18.3070, 0.05),
        (30.0, 59.7031, 0.001),
        (100.0, 124.342, 0.05),
    ] {
        let computed = gamma_upper(freedom / 2.0, statistic / 2.0);
        assert!((computed / p - 1.0_f64).abs() < 1e-4, "{freedom}: {computed} for {p}");
    }
}
