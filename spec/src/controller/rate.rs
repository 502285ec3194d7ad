//! How likely the next drafted token is accepted, by depth. The invariant: rates are conditional on
//! the depth above having been accepted, so one estimate serves chains of every length.

/// Rounds that weigh in an estimate while nothing changes.
const ROUNDS: f64 = 256.0;
/// Latest draws that are searched for a change.
const WINDOW: u32 = 24;
/// Log-likelihood ratio from which a change is believed: by chance it is reached about once in
/// several thousand rounds.
const EVIDENCE: f64 = 11.5;
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
    tally: Tally,
    /// The latest draws, the last in the lowest bit, and how many there are.
    latest: u32,
    latest_draws: u32,
}

/// Exponentially weighted counts.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    accepted: f64,
    draws: f64,
}

impl AcceptanceRates {
    /// Learns from a round that drafted `depth` levels and accepted `accepted` tokens. Says whether
    /// acceptance turns out to have fallen.
    pub(super) fn observe(&mut self, depth: usize, accepted: usize) -> bool {
        if self.depths.len() < depth {
            self.depths.resize(depth, Depth::default());
        }
        let mut changed = None;
        for (level, count) in self.depths.iter_mut().enumerate() {
            if level >= depth {
                // Not drafted: forget slowly, so that the rate returns to that of the depth above
                // and deeper drafts are tried again.
                count.tally.fade();
            } else if level <= accepted {
                let change = count.add(level < accepted);
                changed = changed.or(change.map(|difference| (level, difference)));
            }
        }
        if let Some((level, _)) = changed {
            // What is known of deeper levels is from before the change.
            self.depths.truncate(level + 1);
        }
        changed.is_some_and(|(_, difference)| difference < 0.0)
    }

    /// Makes the past weigh no more than `draws` draws, so that a trial shows what holds now.
    pub(super) fn limit_memory(&mut self, draws: f64) {
        for depth in &mut self.depths {
            depth.tally.limit(draws);
            depth.latest_draws = 0;
        }
    }

    /// Draws that the estimate of the first level rests on.
    pub(super) fn draws(&self) -> f64 {
        self.depths.first().map_or(0.0, |depth| depth.tally.draws)
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

    /// Each level's rate, smoothed towards the level above (drafts are about as good at each
    /// depth), and the draws it rests on.
    fn rates(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let counts = self.depths.iter().map(|depth| depth.tally);
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
    /// Says whether the rate turns out to have changed, and by how much.
    fn add(&mut self, accepted: bool) -> Option<f64> {
        self.tally.fade();
        self.tally.draws += 1.0;
        self.tally.accepted += f64::from(u8::from(accepted));
        self.latest = self.latest << 1 | u32::from(accepted);
        self.latest_draws = WINDOW.min(self.latest_draws + 1);
        let latest = self.change()?;
        let difference = latest.mean() - self.tally.mean();
        self.tally = latest;
        // Draws from before the change must not speak for a change back.
        self.latest_draws = latest.draws as u32;
        Some(difference)
    }

    /// The draws since the most likely moment of a change, if the likelihood ratio speaks for one.
    fn change(&self) -> Option<Tally> {
        // Rates of exactly 0 or 1 are never known.
        let mean = self.tally.mean().clamp(0.02, 0.98);
        let windows = (1..=self.latest_draws).map(|draws| {
            let accepted = (self.latest & ((1 << draws) - 1)).count_ones();
            let latest = Tally { accepted: f64::from(accepted), draws: f64::from(draws) };
            let rate = latest.mean();
            let gain =
                |part: f64, whole: f64| if part > 0.0 { part * (part / whole).ln() } else { 0.0 };
            (latest.draws * (gain(rate, mean) + gain(1.0 - rate, 1.0 - mean)), latest)
        });
        let likeliest = windows.max_by(|a, b| a.0.total_cmp(&b.0));
        likeliest.filter(|&(evidence, _)| evidence > EVIDENCE).map(|(_, latest)| latest)
    }
}

impl Tally {
    fn fade(&mut self) {
        self.limit(self.draws * (1.0 - 1.0 / ROUNDS));
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
    fn a_change_shows_within_ten_rounds() {
        let mut rates = AcceptanceRates::default();
        for _ in 0..1000 {
            rates.observe(1, 1);
        }
        for _ in 0..10 {
            rates.observe(1, 0);
        }
        assert!(rates.rate(0) < 0.2, "{}", rates.rate(0));
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
