//! The answer of a request: tokens become events and text, and something ends it.
//!
//! Invariant: text is given out in whole characters, in the order of the tokens, and never holds
//! any part of a stop text.

use paceline_model::tokenizer::{StreamDecoder, Tokenizer};
use paceline_spec::Statistics;

use crate::{
    request::{Event, FinishReason, Flow, Outcome, Request, Timings, TokenEvent},
    round::{Round, Sequence},
    sampling::{log_sum_exp, top_logits},
    stop_text::StopScanner,
    worker::leader::Leader,
};

/// The answer of a request as it grows.
pub(crate) struct Answer<'a> {
    request: &'a Request,
    tokens_max: usize,
    stop_ids: Vec<u32>,
    tokens: Vec<u32>,
    text: String,
    decoder: Option<StreamDecoder>,
    scanner: StopScanner,
    statistics: Statistics,
    accepted: Vec<usize>,
}

impl<'a> Answer<'a> {
    /// An empty answer.
    pub(crate) fn new(
        request: &'a Request,
        tokens_max: usize,
        tokenizer: Option<&Tokenizer>,
        stop_ids: Vec<u32>,
    ) -> Self {
        Self {
            request,
            tokens_max,
            stop_ids,
            tokens: Vec::new(),
            text: String::new(),
            decoder: tokenizer.map(Tokenizer::stream),
            scanner: StopScanner::new(&request.stop_texts),
            statistics: Statistics::default(),
            accepted: Vec::new(),
        }
    }

    /// The most tokens that there is room for.
    pub(crate) fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    /// The tokens so far.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes a round's tokens until one of them ends the answer. `path` names the rows of the last
    /// pass's logits that they were chosen from.
    pub(crate) fn take(
        &mut self,
        leader: &Leader,
        sequence: &Sequence,
        path: &[usize],
        emitted: &[u32],
        on_event: &mut impl FnMut(Event<'_>) -> Flow,
    ) -> Option<FinishReason> {
        let first_position = sequence.tokens.len() - emitted.len() - 1;
        for (index, (&id, &row)) in emitted.iter().zip(path).enumerate() {
            let event = self.event(leader, id, row, first_position + index);
            self.tokens.push(id);
            if on_event(Event::Token(&event)).is_break() {
                return Some(FinishReason::Cancelled);
            }
            if self.stop_ids.contains(&id) && !self.request.ignore_eos {
                return Some(FinishReason::Stop);
            }
            if let Some(piece) = self.decoder.as_mut().and_then(|decoder| decoder.push(id)) {
                let (text, stopped) = self.scanner.push(&piece);
                self.text.push_str(&text);
                if !text.is_empty() && on_event(Event::Text(&text)).is_break() {
                    return Some(FinishReason::Cancelled);
                }
                if stopped {
                    return Some(FinishReason::Stop);
                }
            }
            if self.tokens.len() == self.tokens_max {
                return Some(FinishReason::Length);
            }
        }
        None
    }

    fn event(&self, leader: &Leader, id: u32, row: usize, position: usize) -> TokenEvent {
        let (mut logprob, mut logits) = (None, None);
        if self.request.logprobs || self.request.top_logits > 0 {
            let width = leader.logits().width();
            let row = &leader.logits().as_slice::<f32>()[row * width..(row + 1) * width];
            if self.request.logprobs {
                logprob = Some((f64::from(row[id as usize]) - log_sum_exp(row)) as f32);
            }
            if self.request.top_logits > 0 {
                logits = Some(top_logits(row, position, self.request.top_logits));
            }
        }
        TokenEvent { id, index: self.tokens.len(), logprob, logits }
    }

    /// Counts a round, of whose tokens `emitted` became part of the answer.
    pub(crate) fn record(&mut self, round: &Round, emitted: usize) {
        self.accepted.push(round.acceptance.accepted());
        let (drafted, depth) = (round.width - 1, round.plan.depth());
        self.statistics.record(drafted, depth, round.acceptance.accepted(), emitted);
    }

    /// Gives out what is held back, and the whole.
    pub(crate) fn finish(
        mut self,
        finish_reason: FinishReason,
        timings: Timings,
        on_event: &mut impl FnMut(Event<'_>) -> Flow,
    ) -> Outcome {
        let stopped_by_text = finish_reason == FinishReason::Stop
            && self.tokens.last().is_none_or(|id| !self.stop_ids.contains(id));
        if !stopped_by_text {
            let mut rest = self.decoder.as_mut().and_then(StreamDecoder::flush).unwrap_or_default();
            let (text, stopped) = self.scanner.push(&rest);
            rest = text;
            if !stopped {
                rest.push_str(&self.scanner.finish());
            }
            self.text.push_str(&rest);
            if !rest.is_empty() && finish_reason != FinishReason::Cancelled {
                let _ = on_event(Event::Text(&rest));
            }
        }
        let (tokens, text, speculation) = (self.tokens, self.text, self.statistics);
        let accepted = self.accepted;
        Outcome { tokens, text, finish_reason, timings, speculation, accepted }
    }
}
