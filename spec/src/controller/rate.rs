//! How likely the next drafted token is accepted, by depth. The invariant: rates are conditional on
//! the depth above having been accepted, so one estimate serves chains of every length.

/// Rounds that weigh in the estimate of the steady state, and in the one that notices changes.
const ROUNDS_SLOW: f64 = 256.0;
const ROUNDS_FAST: f64 = 16.0;
/// Draws of the fast estimate before it may contradict the slow one.
const ROUNDS_EVIDENCE: f64 = 10.0;
/// Standard deviations by which the fast estimate must part from the slow one.
const DEVIATIONS: f64 = 3.5;
/// Draws that the prior counts as.
const PRIOR_WEIGHT: f64 = 2.0;
/// Acceptance assumed before anything is known: high, so that a good draft is not given up for an
/// unlucky start; four rounds without any acceptance bring it down to 0.27.
const PRIOR: f64 = 0.8;

/// Recent acceptance of one way to draft.
#[derive(Debug, Clone, Default)]
pub(super) struct AcceptanceRates {
    depths: Vec<Depth>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Depth {
    slow: Tally,
    fast: Tally,
}

/// Exponentially weighted counts.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    accepted: f64,
    draws: f64,
}

impl AcceptanceRates {
    /// Learns from a round that drafted `depth` levels and accepted `accepted` tokens.
    pub(super) fn observe(&mut self, depth: usize, accepted: usize) {
        if self.depths.len() < depth {
            self.depths.resize(depth, Depth::default());
        }
        for (level, count) in self.depths.iter_mut().enumerate() {
            if level >= depth {
                // Not drafted: forget slowly, so that the rate returns to that of the depth above
                // and deeper drafts are tried again.
                count.slow.fade(ROUNDS_SLOW);
                count.fast.fade(ROUNDS_SLOW);
            } else if level <= accepted {
                count.add(level < accepted);
            }
        }
    }

    /// Makes the past weigh no more than `draws` draws, so that a trial shows what holds now.
    pub(super) fn limit_memory(&mut self, draws: f64) {
        for Depth { slow, fast } in &mut self.depths {
            slow.limit(draws);
            *fast = Tally::default();
        }
    }

    /// Probability that the token of `level` (0 below the root) is accepted if those above are.
    #[cfg(test)]
    pub(super) fn rate(&self, level: usize) -> f64 {
        self.rates().nth(level).expect("rates never end").0
    }

    /// Tokens a round emits when it drafts `depth` levels, the bonus token included.
    pub(super) fn tokens(&self, depth: usize) -> f64 {
        tokens(self.rates().take(depth).map(|(rate, _)| rate))
    }

    /// As [`tokens`](Self::tokens), with every rate one standard deviation above its estimate: what
    /// the draft may yet turn out to do.
    pub(super) fn tokens_hoped(&self, depth: usize) -> f64 {
        let rates = self.rates().take(depth);
        tokens(rates.map(|(rate, draws)| {
            let draws = draws + PRIOR_WEIGHT;
            (rate + (rate * (1.0 - rate) / draws).sqrt()).min(1.0)
        }))
    }

    /// Each level's rate, smoothed towards the level above (drafts are about as good at each depth),
    /// and the draws it rests on.
    fn rates(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let counts = self.depths.iter().map(|depth| depth.slow);
        counts.chain(std::iter::repeat(Tally::default())).scan(PRIOR, |prior, tally| {
            *prior = (tally.accepted + PRIOR_WEIGHT * *prior) / (tally.draws + PRIOR_WEIGHT);
            Some((*prior, tally.draws))
        })
    }
}

/// 1 + r_1 + r_1 r_2 + …
fn tokens(rates: impl Iterator<Item = f64>) -> f64 {
    let mut reached = 1.0;
    let levels = rates.map(|rate| {
        reached *= rate;
        reached
    });
    1.0 + levels.sum::<f64>()
}

impl Depth {
    fn add(&mut self, accepted: bool) {
        self.slow.add(accepted, ROUNDS_SLOW);
        self.fast.add(accepted, ROUNDS_FAST);
        if self.fast.draws < ROUNDS_EVIDENCE {
            return;
        }
        let (slow, fast) = (self.slow.mean(), self.fast.mean());
        // An exponential average over n rounds varies like a plain one over 2 n.
        let spread = (0.01 + slow * (1.0 - slow)) / (2.0 * self.fast.draws);
        if (fast - slow).abs() > DEVIATIONS * spread.sqrt() {
            self.slow = self.fast;
        }
    }
}

impl Tally {
    fn add(&mut self, accepted: bool, rounds: f64) {
        self.fade(rounds);
        self.draws += 1.0;
        self.accepted += f64::from(u8::from(accepted));
    }

    fn fade(&mut self, rounds: f64) {
        self.limit(self.draws * (1.0 - 1.0 / rounds));
    }

    fn limit(&mut self, draws: f64) {
        if self.draws > draws {
            self.accepted *= draws / self.draws;
            self.draws = draws;
        }
    }

    fn mean(&self) -> f64 {
        self.accepted / self.draws
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditional_rates_and_expected_tokens() {
        let mut rates = AcceptanceRates::default();
        assert!((rates.tokens(2) - 2.44).abs() < 1e-9);
        // Depth 1 accepted in 3 of 4 rounds, depth 2 in 1 of 3.
        for _ in 0..500 {
            for accepted in [0, 1, 2, 1] {
                rates.observe(2, accepted);
            }
        }
        assert!((rates.rate(0) - 0.75).abs() < 0.02, "{}", rates.rate(0));
        assert!((rates.rate(1) - 1.0 / 3.0).abs() < 0.02, "{}", rates.rate(1));
        assert!((rates.tokens(2) - 2.0).abs() < 0.03, "{}", rates.tokens(2));
        assert_eq!(rates.rate(2), rates.rate(1), "unknown depths are as good as the one above");
    }

    #[test]
    fn a_change_shows_within_thirty_rounds() {
        let mut rates = AcceptanceRates::default();
        for _ in 0..1000 {
            rates.observe(1, 1);
        }
        for _ in 0..30 {
            rates.observe(1, 0);
        }
        assert!(rates.rate(0) < 0.4, "{}", rates.rate(0));
    }

    #[test]
    fn depths_that_are_not_drafted_return_to_the_one_above() {
        let mut rates = AcceptanceRates::default();
        for _ in 0..100 {
            rates.observe(2, 1);
        }
        assert!(rates.rate(0) > 0.95 && rates.rate(1) < 0.05);
        for _ in 0..3000 {
            rates.observe(1, 1);
        }
        assert!(rates.rate(1) > 0.9, "{}", rates.rate(1));
    }
}
