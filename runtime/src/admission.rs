//! Which requests an engine can serve. Invariant: what passes [`Admission::check`] can be served to
//! its end, whatever else runs.

use crate::{
    error::{Result, RuntimeError},
    pages::PAGE_ROWS,
    request::{Request, Speculation},
    sampling,
    scheduler::{Refusal, SchedulerLimits},
};

/// Bounds of requests.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    limits: SchedulerLimits,
    vocabulary: usize,
    /// Most rows of a sequence in a pass.
    tree_rows_max: usize,
    /// Tokens that the draft knows, if there is one.
    proposable_tokens: Option<usize>,
}

impl Admission {
    pub(crate) fn new(
        limits: SchedulerLimits,
        vocabulary: usize,
        tree_rows_max: usize,
        proposable_tokens: Option<usize>,
    ) -> Self {
        Self { limits, vocabulary, tree_rows_max, proposable_tokens }
    }

    /// Most requests that an engine holds: those it works on and those that wait.
    pub(crate) fn requests_max(&self) -> usize {
        self.limits.sequences_max.saturating_add(self.limits.waiting_max)
    }

    /// Refuses what can never work, before anything is done.
    ///
    /// # Errors
    /// [`RuntimeError::Request`].
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        let refuse = |what, got: String, limit: String, advice| {
            Err(RuntimeError::Request { what, got, limit, advice })
        };
        let (length, vocabulary) = (request.prompt.len(), self.vocabulary);
        if length == 0 {
            let limit = "a model needs at least one token".to_owned();
            return refuse("the prompt", "empty".to_owned(), limit, "give it some text");
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocabulary) {
            let limit = format!("this model's ids end at {}", vocabulary - 1);
            return refuse("a token id", id.to_string(), limit, "use this model's tokenizer");
        }
        if length >= self.limits.context_max {
            let limit = format!("the context holds {} with the answer", self.limits.context_max);
            let got = format!("{length} tokens long");
            return refuse("the prompt", got, limit, "shorten it, or load with a larger context");
        }
        if length >= self.limits.length_max() {
            return Err(self.never_fits(length));
        }
        if request.tokens_max == 0 {
            let limit = "at least one token is generated".to_owned();
            return refuse("the token limit", "0".to_owned(), limit, "ask for 1 or more");
        }
        sampling::check(&request.sampling, vocabulary)?;
        self.check_speculation(request.speculation)
    }

    fn check_speculation(&self, speculation: Speculation) -> Result<()> {
        let refuse = |what, got: String, limit: String, advice| {
            Err(RuntimeError::Request { what, got, limit, advice })
        };
        let rows_max = self.tree_rows_max;
        match (speculation, self.proposable_tokens) {
            (Speculation::Off, _) => Ok(()),
            (_, None) => {
                let limit = "no draft network was loaded".to_owned();
                let advice = "give a draft, or turn it off";
                refuse("speculation", "on".to_owned(), limit, advice)
            }
            (Speculation::Chain(drafted), _) if drafted == 0 || drafted >= rows_max => {
                let limit = format!("chains of 1 to {} tokens are possible", rows_max - 1);
                let got = format!("{drafted} tokens long");
                refuse("the chain", got, limit, "choose another length")
            }
            (Speculation::Tree(tree), Some(proposable_tokens))
                if tree.nodes() > rows_max
                    || tree.topk() * (tree.depth() - 1) > rows_max
                    || tree.topk() > proposable_tokens.min(rows_max) =>
            {
                let limit = format!("{rows_max} rows were set aside for trees");
                refuse("the tree", format!("{tree:?}"), limit, "choose a smaller one")
            }
            _ => Ok(()),
        }
    }

    /// The error when `requests` are unfinished and that is the most.
    pub(crate) fn busy(&self, requests: usize) -> RuntimeError {
        let waiting = requests.saturating_sub(self.limits.sequences_max);
        RuntimeError::Busy { waiting, waiting_max: self.limits.waiting_max }
    }

    /// The error for a prompt of this length that is longer than the whole cache.
    fn never_fits(&self, length: usize) -> RuntimeError {
        let cache_rows = self.limits.pages * PAGE_ROWS;
        RuntimeError::Request {
            what: "the prompt",
            got: format!("{length} tokens long"),
            limit: format!("the whole cache holds {cache_rows} tokens with the answer"),
            advice: "shorten it, or load with a larger cache",
        }
    }

    /// What the scheduler's refusal means to whoever asked.
    pub(crate) fn refusal(&self, request: &Request, refusal: Refusal) -> RuntimeError {
        match refusal {
            Refusal::Busy { waiting } => {
                RuntimeError::Busy { waiting, waiting_max: self.limits.waiting_max }
            }
            Refusal::NeverFits { prompt, .. } => self.never_fits(prompt),
            Refusal::Empty => RuntimeError::Request {
                what: "the request",
                got: format!("{} tokens and {}", request.prompt.len(), request.tokens_max),
                limit: "prompt and answer have at least one token each".to_owned(),
                advice: "give it some text",
            },
        }
    }
}
