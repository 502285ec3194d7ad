//! What a user asks of the engine, and what the engine tells back.

use std::{ops::ControlFlow, time::Duration};

use paceline_spec::{Statistics, TreeParameters};

/// A prompt and how to go on from it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub tokens_max: usize,
    /// Stop ids cannot be chosen before this many tokens were. Stop texts end an answer anyway.
    pub tokens_min: usize,
    /// Go on after stop ids.
    pub ignore_eos: bool,
    /// Texts that end the answer; they are not part of it.
    pub stop_texts: Vec<String>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How far ahead to draft.
    pub speculation: Speculation,
    /// Whether each token's log-probability is reported.
    pub logprobs: bool,
    /// How many of the most probable tokens to report with each token, with their
    /// log-probabilities.
    pub top_logprobs: usize,
    /// How many of the largest logits to report with each token.
    pub top_logits: usize,
}

impl Request {
    /// A greedy request without speculation.
    pub fn new(prompt: Vec<u32>, tokens_max: usize) -> Self {
        Self {
            prompt,
            tokens_max,
            tokens_min: 0,
            ignore_eos: false,
            stop_texts: Vec::new(),
            sampling: Sampling::default(),
            speculation: Speculation::Off,
            logprobs: false,
            top_logprobs: 0,
            top_logits: 0,
        }
    }
}

/// How a token is chosen from the logits.
///
/// Each step takes what the one before it leaves, in this order: repetition penalty, frequency and
/// presence penalties, logit bias, temperature, top-k, top-p, min-p. Greedy choice takes the
/// largest logit after the bias. Speculation changes none of it: a drafted token's logits are
/// penalised for the tokens drafted before it as well.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 chooses the largest (greedy).
    pub temperature: f32,
    /// Keep this many of the largest; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep those with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Start of the random numbers; `None` takes one from the system.
    pub seed: Option<u64>,
    /// For each token that occurs in the prompt or the answer, a positive logit z becomes
    /// z / repetition, another one z · repetition (CTRL, section 4.1, as in Hugging Face
    /// transformers); 1 changes nothing.
    pub repetition_penalty: f32,
    /// For each token that occurs in the answer, z becomes z - presence (as in OpenAI's API).
    pub presence_penalty: f32,
    /// For each token that occurs c times in the answer, z becomes z - c · frequency (as in
    /// OpenAI's API).
    pub frequency_penalty: f32,
    /// What is added to the logits of these tokens, each named once (as in OpenAI's API).
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

/// Whether and how to draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    /// One token a pass.
    Off,
    /// Chains of this many drafted tokens.
    Chain(usize),
    /// Dynamic trees of one shape.
    Tree(TreeParameters),
    /// Before each round, whatever promises the most tokens a second for as many sequences as are
    /// served just then, plain decoding included.
    Auto,
}

/// Something that happened while a request ran.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Part of the prompt went through the model; after a preemption, of prompt and answer.
    Prefill {
        /// Tokens done, those included whose rows were found in the cache.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// A token was chosen.
    Token(&'a TokenEvent),
    /// Text that is complete: whole characters, no part of a stop text.
    Text(&'a str),
    /// The request is over; the last event.
    Finished(&'a Outcome),
}

/// Name of a request, unique within an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A chosen token.
#[derive(Clone, Debug)]
pub struct TokenEvent {
    /// Its id.
    pub id: u32,
    /// Its place among the generated tokens, from 0.
    pub index: usize,
    /// log softmax of the raw logits at this token, if asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens by the raw logits and log softmax at each, largest first; as many
    /// as were asked for.
    pub top_logprobs: Vec<(u32, f32)>,
    /// What the token was chosen from, if asked for.
    pub logits: Option<TopLogits>,
}

/// The largest logits of one position and two numbers about the whole row.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TopLogits {
    /// Position in the sequence of the token that was fed.
    pub position: usize,
    /// Token ids and logits, largest first.
    pub top: Vec<(u32, f32)>,
    /// Mean of all logits.
    pub mean: f32,
    /// Logarithm of the sum of their exponentials.
    pub logsumexp: f32,
}

/// Whether to go on after an event.
pub type Flow = ControlFlow<()>;

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop id or stop text.
    Stop,
    /// `tokens_max`, or the end of the context.
    Length,
    /// The receiver of events or [`Engine::cancel`](crate::Engine::cancel) said so.
    Cancelled,
}

/// What a request did and took.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Generated ids, a final stop id included.
    pub tokens: Vec<u32>,
    /// Text of the answer, without special tokens and stop text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Seconds.
    pub timings: Timings,
    /// Rounds and acceptance.
    pub speculation: Statistics,
    /// Drafted tokens that each round accepted, before any cut at the end of the answer.
    pub accepted: Vec<usize>,
    /// Tokens of the prompt whose rows were found in the cache when the request was started.
    pub prefix_reused: usize,
    /// How often the request had to give up its place in the cache and start anew.
    pub preemptions: usize,
}

/// Where the time of a request went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// From submission to the first pass.
    pub queue: Duration,
    /// From submission to the first token.
    pub first_token: Duration,
    /// Passes over the prompt, and the draft's.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// The draft's part of it, for all sequences of each round.
    pub draft: Duration,
    /// The target passes' part of it, for all sequences of each round.
    pub verify: Duration,
}

impl Outcome {
    /// What ended for `finish_reason` before it began.
    pub(crate) fn empty(finish_reason: FinishReason) -> Self {
        Self {
            tokens: Vec::new(),
            text: String::new(),
            finish_reason,
            timings: Timings::default(),
            speculation: Statistics::default(),
            accepted: Vec::new(),
            prefix_reused: 0,
            preemptions: 0,
        }
    }

    /// Tokens a second after the first one.
    pub fn tokens_per_second(&self) -> f64 {
        let seconds = self.timings.decode.as_secs_f64();
        match self.tokens.len() {
            0 | 1 => 0.0,
            count => (count - 1) as f64 / seconds.max(1e-9),
        }
    }
}
