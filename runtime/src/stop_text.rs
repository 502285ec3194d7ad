//! Finding stop texts in a stream of text.
//!
//! Invariant: text is given out only when no stop text can begin in it any more.

/// Holds back text that may be the beginning of a stop text.
#[derive(Clone, Debug)]
pub struct StopScanner {
    stops: Vec<String>,
    held: String,
}

impl StopScanner {
    /// A scanner for these texts; empty ones are left out.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new() }
    }

    /// Takes the next piece. Returns the text that can be given out, and whether a stop text was
    /// found; what follows it is dropped.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return (text, true);
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What is still held back when the stream has ended.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(at, _)| at)
        .filter(|&at| at > 0)
        .rev()
        .find(|&length| text.ends_with(&stop[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However a text is cut into pieces, the same comes out.
    fn run(stops: &[&str], text: &str) -> Vec<(String, bool)> {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let mut outcomes = Vec::new();
        for &first in &cuts {
            for &second in cuts.iter().filter(|&&second| second >= first) {
                let mut scanner = StopScanner::new(&stops);
                let mut all = String::new();
                let mut stopped = false;
                for piece in [&text[..first], &text[first..second], &text[second..]] {
                    if !stopped {
                        let (out, found) = scanner.push(piece);
                        all.push_str(&out);
                        stopped = found;
                    }
                }
                if !stopped {
                    all.push_str(&scanner.finish());
                }
                outcomes.push((all, stopped));
            }
        }
        outcomes
    }

    #[test]
    fn cuts_at_the_first_stop_text() {
        for (stops, text, expected, found) in [
            (&["END"][..], "one ENEND two", "one EN", true),
            (&["ab", "b"], "xxab", "xx", true),
            (&["\n\n"], "a\nb\n\nc", "a\nb", true),
            (&["é!"], "caféé!", "café", true),
            (&["stop"], "sto", "sto", false),
            (&[""], "text", "text", false),
            (&[], "text", "text", false),
        ] {
            for outcome in run(stops, text) {
                assert_eq!(outcome, (expected.to_string(), found), "{stops:?} in {text}");
            }
        }
    }
}
