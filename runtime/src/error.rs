//! What can go wrong while a request runs.

use paceline_comm::CommError;
use paceline_kernels::KernelError;
use paceline_model::ModelError;
use paceline_spec::SpecError;

/// Errors of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The model, its draft or its tokenizer.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The draft's files.
    #[error("the draft: {0}")]
    Draft(#[source] ModelError),
    /// The ranks' connection.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Tensors or threads.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Trees or acceptance: numbers that no working model produces.
    #[error("speculation failed: {0}; run with speculation off, and check the draft")]
    Speculation(#[from] SpecError),
    /// A request that this engine can never serve.
    #[error("{what} is {got}, but {limit}; {advice}")]
    Request {
        /// Which part of the request.
        what: &'static str,
        /// Its value.
        got: String,
        /// The bound that it breaks.
        limit: String,
        /// What to do instead.
        advice: &'static str,
    },
    /// As many requests wait as may.
    #[error(
        "{waiting} requests wait already, as many as may ({waiting_max}); submit this one again \
         when others have finished, or let more of them wait"
    )]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// Most requests that may wait.
        waiting_max: usize,
    },
    /// Something that needs an engine to itself.
    #[error("{what} needs an idle engine, but it works on {requests} requests; let them finish")]
    InUse {
        /// What was asked for.
        what: &'static str,
        /// Unfinished requests.
        requests: usize,
    },
    /// The engine failed before and serves no more.
    #[error("the engine stopped after a failure: {cause}; load the model again")]
    Stopped {
        /// The failure.
        cause: String,
    },
    /// The system has no thread for the engine.
    #[error("the engine's thread could not be started: {0}; let this program have more threads")]
    Thread(#[source] std::io::Error),
    /// The model produced numbers that are no logits.
    #[error(
        "the logits of position {position} are not finite: the weights are damaged or do not fit \
         this configuration; run `paceline inspect` on the checkpoint, or try --dtype f32"
    )]
    LogitsNotFinite {
        /// Position in the sequence.
        position: usize,
    },
    /// A rank's thread ended with an error of its own.
    #[error("rank {rank} failed: {reason}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error.
        reason: String,
    },
    /// Ranks were started with different settings or files.
    #[error(
        "rank {this} and rank {other} differ in {setting}: start all ranks with the same \
         options, on the same files"
    )]
    RanksDiffer {
        /// What differs.
        setting: &'static str,
        /// This rank.
        this: usize,
        /// The other one.
        other: usize,
    },
    /// A control message that this version does not understand.
    #[error("a control message from rank 0 is damaged ({what}); run the same version on all ranks")]
    Protocol {
        /// What was wrong.
        what: &'static str,
    },
}

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, RuntimeError>;

impl RuntimeError {
    /// Whether this only says that another rank failed, not why.
    pub(crate) fn is_connection(&self) -> bool {
        matches!(self, Self::Comm(_) | Self::Model(ModelError::Comm(_)))
    }
}
