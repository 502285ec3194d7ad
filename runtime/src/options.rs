//! How an engine is set up.

use std::time::Duration;

use paceline_comm::Communicator;
use paceline_kernels::DType;
use paceline_model::weights::Source;
use paceline_spec::TreeParameters;

/// Everything about an engine that a request cannot change.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The model.
    pub model: Source,
    /// Its draft network; without one, speculation is off.
    pub draft: Option<Source>,
    /// Type of activations and cache: f32, bf16 or f16.
    pub dtype: DType,
    /// Whether routed experts are dealt out whole over the ranks instead of being split.
    pub expert_parallel: bool,
    /// Threads of each rank; 0 shares the machine's cores among the ranks.
    pub threads: usize,
    /// Longest sequence, prompt and answer together; 0 takes the model's own limit, but at most
    /// [`CONTEXT_DEFAULT_MAX`].
    pub context_max: usize,
    /// Rows of a prompt that go through the model at a time.
    pub prefill_rows: usize,
    /// Tokens that the cache holds, of all sequences together, rounded up to whole pages; 0 takes
    /// room for as many whole sequences of `context_max` as fit into
    /// [`CACHE_DEFAULT_BYTES_MAX`], at least for one and at most for
    /// [`EngineOptions::sequences_max`]. A sequence that runs out of room waits, and begins anew,
    /// until others are done.
    pub cache_tokens: usize,
    /// Most sequences that are worked on at the same time.
    pub sequences_max: usize,
    /// Most requests that wait for their turn; further ones are refused.
    pub waiting_max: usize,
    /// Whether the cache keeps the rows of finished requests for prompts that begin alike.
    pub prefix_reuse: bool,
    /// Whether that holds for rows of answers too, which a conversation needs. They differ by
    /// rounding from those that a prompt with the same tokens would have made, so where two logits
    /// nearly tie, the next answer may then depend on what ran before.
    pub prefix_reuse_of_answers: bool,
    /// Residual streams that the draft reads, if not those that its configuration names.
    pub capture_points: Option<Vec<usize>>,
    /// Longest chain that a request may draft.
    pub chain_drafted_max: usize,
    /// Trees that [`Speculation::Auto`](crate::Speculation::Auto) considers; the largest also
    /// bounds the trees of requests.
    pub trees: Vec<TreeParameters>,
}

/// Longest sequence that memory is set aside for unless more is asked for.
pub const CONTEXT_DEFAULT_MAX: usize = 8192;

/// Size of a rank's cache unless more is asked for, if one sequence does not need more. The memory
/// is taken as it is first used.
pub const CACHE_DEFAULT_BYTES_MAX: usize = 1 << 30;

impl EngineOptions {
    /// Options for a model and perhaps a draft, with defaults for the rest.
    pub fn new(model: Source, draft: Option<Source>) -> Self {
        let tree = |topk, depth, nodes| {
            TreeParameters::new(topk, depth, nodes).expect("these shapes can be built")
        };
        Self {
            model,
            draft,
            dtype: DType::F32,
            expert_parallel: false,
            threads: 0,
            context_max: 0,
            prefill_rows: 256,
            cache_tokens: 0,
            sequences_max: 16,
            waiting_max: 256,
            prefix_reuse: true,
            prefix_reuse_of_answers: true,
            capture_points: None,
            chain_drafted_max: 8,
            trees: vec![tree(2, 4, 8), tree(4, 4, 16)],
        }
    }
}

/// Which ranks there are and how they are reached.
pub enum Ranks {
    /// This many ranks as threads of this process.
    Threads {
        /// Number of ranks.
        count: usize,
        /// Deadline of each collective.
        timeout: Duration,
    },
    /// This process is one rank of a group of processes.
    Process(Box<Communicator>),
}
