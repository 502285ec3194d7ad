//! The answer of a request: tokens become events and text, and something ends it.
//!
//! Invariant: text is given out in whole characters, in the order of the tokens, and never holds
//! any part of a stop text.

use std::{mem::take, sync::Arc};

use paceline_model::tokenizer::{StreamDecoder, Tokenizer};
use paceline_spec::{Acceptance, Statistics};

use crate::{
    logprobs::token_event,
    request::{Event, FinishReason, Flow, Outcome, Request, TokenEvent},
    sampling::NodeLogits,
    stop_text::StopScanner,
};

/// Who hears of a request's events.
pub(crate) type Listener<'a> = &'a mut dyn FnMut(Event<'_>) -> Flow;

/// The answer of a request as it grows.
pub(crate) struct Answer {
    request: Request,
    tokens_max: usize,
    stop_ids: Arc<[u32]>,
    tokens: Vec<u32>,
    text: String,
    decoder: Option<StreamDecoder>,
    scanner: StopScanner,
    /// Whether a stop text came, so that nothing after it is given out.
    is_cut: bool,
    statistics: Statistics,
    accepted: Vec<usize>,
}

impl Answer {
    /// An empty answer, with room for `tokens_max` tokens.
    pub(crate) fn new(
        request: Request,
        tokens_max: usize,
        tokenizer: Option<&Tokenizer>,
        stop_ids: Arc<[u32]>,
    ) -> Self {
        Self {
            tokens_max,
            stop_ids,
            tokens: Vec::new(),
            text: String::new(),
            decoder: tokenizer.map(Tokenizer::stream),
            scanner: StopScanner::new(&request.stop_texts),
            is_cut: false,
            statistics: Statistics::default(),
            accepted: Vec::new(),
            request,
        }
    }

    /// What was asked for.
    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    /// Its tokens so far.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that there is room for.
    pub(crate) fn tokens_left(&self) -> usize {
        self.tokens_max - self.tokens.len()
    }

    /// Takes a round's tokens until one of them ends the answer. `nodes` are the logits that they
    /// were chosen from. Returns how many became part of the answer, and why it ends.
    pub(crate) fn take(
        &mut self,
        acceptance: &Acceptance,
        nodes: NodeLogits<'_>,
        on_event: Listener<'_>,
    ) -> (usize, Option<FinishReason>) {
        let Acceptance { path, emitted } = acceptance;
        for (index, (&id, &node)) in emitted.iter().zip(path).enumerate() {
            let (place, position) = (self.tokens.len(), nodes.position + index);
            let event = token_event(&self.request, id, place, nodes.row(node), position);
            self.tokens.push(id);
            let finish = self.take_token(&event, on_event);
            if finish.is_some() {
                return (index + 1, finish);
            }
        }
        (emitted.len(), None)
    }

    fn take_token(&mut self, event: &TokenEvent, on_event: Listener<'_>) -> Option<FinishReason> {
        if on_event(Event::Token(event)).is_break() {
            return Some(FinishReason::Cancelled);
        }
        if self.stop_ids.contains(&event.id) && !self.request.ignore_eos {
            return Some(FinishReason::Stop);
        }
        let full = (self.tokens_left() == 0).then_some(FinishReason::Length);
        self.take_text(event.id, on_event).or(full)
    }

    /// Gives out the text that token `id` completes.
    fn take_text(&mut self, id: u32, on_event: Listener<'_>) -> Option<FinishReason> {
        let piece = self.decoder.as_mut()?.push(id)?;
        let (text, stopped) = self.scanner.push(&piece);
        self.is_cut = stopped;
        self.text.push_str(&text);
        if !text.is_empty() && on_event(Event::Text(&text)).is_break() {
            return Some(FinishReason::Cancelled);
        }
        stopped.then_some(FinishReason::Stop)
    }

    /// Counts a round that drafted `drafted` nodes, `depth` deep, of whose tokens `emitted` became
    /// part of the answer.
    pub(crate) fn record(&mut self, drafted: usize, depth: usize, accepted: usize, emitted: usize) {
        self.accepted.push(accepted);
        self.statistics.record(drafted, depth, accepted, emitted);
    }

    /// Gives out what is held back, and the whole, without what only the engine knows. Nothing is
    /// left then.
    pub(crate) fn finish(&mut self, reason: FinishReason, on_event: Listener<'_>) -> Outcome {
        if !self.is_cut {
            let mut rest = self.decoder.as_mut().and_then(StreamDecoder::flush).unwrap_or_default();
            let (text, stopped) = self.scanner.push(&rest);
            rest = text;
            if !stopped {
                rest.push_str(&self.scanner.finish());
            }
            self.text.push_str(&rest);
            if !rest.is_empty() && reason != FinishReason::Cancelled {
                // The request is over, whatever the listener says.
                let _ = on_event(Event::Text(&rest));
            }
        }
        Outcome {
            tokens: take(&mut self.tokens),
            text: take(&mut self.text),
            speculation: take(&mut self.statistics),
            accepted: take(&mut self.accepted),
            ..Outcome::empty(reason)
        }
    }
}
