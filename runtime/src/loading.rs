//! From files to a running group of ranks.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paceline_comm::{Communicator, Group, GroupOptions, in_process};
use paceline_kernels::{Stream, Tensor, Weight};
use paceline_model::{
    config::ModelConfig,
    eagle3::{config::DraftConfig, draft::Draft},
    forward::{Model, ModelOptions},
    memory,
    shard::Parallel,
    weights::{Checkpoint, DraftWeights, ModelWeights},
};

use crate::{
    drafter::{Drafter, DrafterSizes},
    error::{Result, RuntimeError},
    options::{CACHE_DEFAULT_BYTES_MAX, CONTEXT_DEFAULT_MAX, EngineOptions, Ranks},
    pages::PAGE_ROWS,
    worker::{agreement::Settings, leader::Leader, rank::Rank},
};

/// Most rows of a decoding pass, unless that many sequences or a tree as large are asked for.
const DECODE_ROWS_MAX: usize = 256;
/// Most sequences at a time.
const SEQUENCES_MAX: usize = 4096;
/// Most rows of a cache; slots are numbered with 32 bits.
const SLOTS_MAX: usize = 1 << 31;

/// What to do if there is no memory for a cache.
const CACHE_ADVICE: &str =
    "ask for a shorter context (--context) or --dtype bf16, or raise the limit";

/// Told bytes done and bytes in all while weights load.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// What a rank needs to know about the model before it loads its shard.
pub(crate) struct Plan {
    pub(crate) config: ModelConfig,
    draft: Option<DraftConfig>,
    pub(crate) context_max: usize,
    /// Most rows of one sequence in a verification pass, and of its scratch rows of the draft.
    pub(crate) tree_rows_max: usize,
    /// Most rows of a verification pass over all its sequences.
    pub(crate) decode_rows_max: usize,
    /// Rows of the cache: whole pages.
    pub(crate) slots: usize,
    checkpoint: Checkpoint,
    model_options: ModelOptions,
}

impl Plan {
    /// Reads configurations and opens the checkpoint.
    pub(crate) fn new(options: &EngineOptions) -> Result<Self> {
        check(options)?;
        let config = options.model.model_config()?;
        let draft = options.draft.as_ref().map(|source| source.draft_config()).transpose();
        let draft = draft.map_err(RuntimeError::Draft)?;
        let capture_points = match &draft {
            Some(draft) => {
                draft.capture_points(config.layers, options.capture_points.as_deref())?.to_vec()
            }
            None => Vec::new(),
        };
        let context_max = context_max(options, &config)?;
        let tree_rows_max = match draft {
            Some(_) => tree_rows_max(options),
            None => 1,
        };
        let sequences_max = options.sequences_max;
        let decode_rows_max = tree_rows_max.saturating_mul(sequences_max).min(DECODE_ROWS_MAX);
        let decode_rows_max = decode_rows_max.max(tree_rows_max).max(sequences_max);
        let model_options = ModelOptions {
            dtype: options.dtype,
            rows_max: options.prefill_rows.min(context_max).max(decode_rows_max),
            logit_rows_max: decode_rows_max,
            capture_points,
        };
        let row_bytes = config.layers * config.latent_width() * options.dtype.bytes();
        let slots = slots(options, context_max + tree_rows_max, row_bytes)?;
        Ok(Self {
            config,
            draft,
            context_max,
            tree_rows_max,
            decode_rows_max,
            slots,
            checkpoint: options.model.checkpoint()?,
            model_options,
        })
    }

    /// Loads one rank's shard.
    fn rank(
        &self,
        options: &EngineOptions,
        mut communicator: Communicator,
        progress: Progress<'_>,
    ) -> Result<Rank> {
        let ranks = communicator.world_size();
        let parallel = Parallel {
            tensor: ranks,
            rank: communicator.rank().0,
            expert_parallel: options.expert_parallel,
        };
        let stream = Stream::host(threads(options, ranks))?;
        if ranks > 1 {
            self.settings(options).agree(&mut communicator, &stream)?;
        }
        let weights = ModelWeights::load(&self.checkpoint, &self.config, &parallel, progress)?;
        options.model.release();
        // Only now, since the weights have confirmed the sizes.
        let cache_bytes = self.config.cache_bytes(self.slots, options.dtype);
        memory::require("the cache", cache_bytes, CACHE_ADVICE)?;
        let (config, model_options) = (self.config.clone(), self.model_options.clone());
        let model = Model::new(config, weights, &parallel, communicator, stream, model_options)?;
        Ok(Rank::new(model, self.slots))
    }

    /// What all ranks must have alike.
    fn settings(&self, options: &EngineOptions) -> Settings {
        let ModelOptions { dtype, rows_max, logit_rows_max, capture_points } = &self.model_options;
        let names: Vec<&str> = self.checkpoint.names().collect();
        Settings::new()
            .text("the model's configuration", &format!("{:?}", self.config))
            .text("the names of its tensors", &names.join("\n"))
            .number("the size of its weights", self.checkpoint.bytes() as usize)
            .text("--dtype", dtype.name())
            .number("--expert-parallel", options.expert_parallel.into())
            .number("--context", self.context_max)
            .number("--prefill-rows", *rows_max)
            .number("the rows of a decoding pass", *logit_rows_max)
            .number("the size of the cache", self.slots)
            .text("the draft's capture points", &format!("{capture_points:?}"))
    }

    /// Loads the draft network for rank 0.
    fn drafter(&self, options: &EngineOptions, model: &Model) -> Result<Option<Drafter>> {
        let (Some(source), Some(config)) = (&options.draft, &self.draft) else { return Ok(None) };
        let weights = source.checkpoint().and_then(|files| DraftWeights::load(&files, config));
        let weights = weights.map_err(RuntimeError::Draft)?;
        source.release();
        let head = match (&weights.head, model.whole_head()) {
            (Some(_), _) => None,
            (None, Some(head)) => Some(head.clone()),
            (None, None) => Some(self.whole_head()?),
        };
        let (dtype, rows_max) = (options.dtype, self.model_options.rows_max);
        let embedding: &Tensor = model.embedding();
        let target = model.config();
        let draft =
            Draft::new(config.clone(), weights, target, embedding, head.as_ref(), dtype, rows_max)?;
        let sizes = DrafterSizes {
            slots: self.slots,
            rows_max,
            positions_max: self.context_max,
            sequences_max: options.sequences_max,
        };
        memory::require("the draft's cache", Drafter::bytes(&draft, dtype, sizes), CACHE_ADVICE)?;
        Ok(Some(Drafter::new(draft, model.stream().clone(), dtype, sizes)))
    }

    /// The target's whole output head, as views: the draft runs on one rank and needs all of it.
    fn whole_head(&self) -> Result<Weight> {
        let whole = Parallel { tensor: 1, rank: 0, expert_parallel: false };
        let weights = ModelWeights::load(&self.checkpoint, &self.config, &whole, &mut |_, _| {})?;
        Ok(weights.head)
    }
}

/// Loads rank 0 and starts the others.
pub(crate) fn lead(
    plan: Plan,
    options: &EngineOptions,
    ranks: Ranks,
    progress: Progress<'_>,
) -> Result<(Leader, Option<Drafter>)> {
    let plan = Arc::new(plan);
    let (communicator, mut threads) = match ranks {
        Ranks::Process(communicator) => (*communicator, RankThreads::default()),
        Ranks::Threads { count: 1, .. } => (Communicator::alone(), RankThreads::default()),
        Ranks::Threads { count, timeout } => {
            let group = GroupOptions { timeout, ..GroupOptions::default() };
            let mut groups = in_process(count, &group)?;
            let others = groups.split_off(1);
            let threads = RankThreads::start(&plan, options, others)?;
            let group = groups.pop().expect("rank 0 was kept");
            (Communicator::connect(group, None)?, threads)
        }
    };
    let rank = match plan.rank(options, communicator, progress) {
        Ok(rank) => rank,
        Err(error) => return Err(threads.explain(error)),
    };
    let leader = Leader::new(rank, threads);
    let drafter = plan.drafter(options, leader.model())?;
    Ok((leader, drafter))
}

/// How long a failed rank's own error is waited for.
const EXPLANATION_MAX: Duration = Duration::from_millis(500);

/// Ranks 1 and up as threads of this process.
#[derive(Default)]
pub(crate) struct RankThreads {
    handles: Vec<Option<JoinHandle<Result<()>>>>,
}

impl RankThreads {
    fn start(plan: &Arc<Plan>, options: &EngineOptions, groups: Vec<Group>) -> Result<Self> {
        let mut threads = Self::default();
        for group in groups {
            let (plan, options, rank) = (Arc::clone(plan), options.clone(), group.rank().0);
            let serve = move || {
                let communicator = Communicator::connect(group, None)?;
                plan.rank(&options, communicator, &mut |_, _| {})?.serve()
            };
            let builder = thread::Builder::new().name(format!("rank-{rank}"));
            let handle = builder.spawn(serve).map_err(|error| RuntimeError::RankFailed {
                rank,
                reason: format!("its thread could not be started ({error}); use fewer ranks"),
            })?;
            threads.handles.push(Some(handle));
        }
        Ok(threads)
    }

    /// What went wrong, if `error` only says that some rank is gone: the error of a thread that
    /// ended for a reason of its own.
    pub(crate) fn explain(&mut self, error: RuntimeError) -> RuntimeError {
        if !error.is_connection() {
            return error;
        }
        // A thread leaves the group before its error can be collected, so give it a moment.
        let deadline = Instant::now() + EXPLANATION_MAX;
        while self.handles.iter().any(Option::is_some) && Instant::now() < deadline {
            if let Some(failure) = self.own_failure() {
                return failure;
            }
            thread::yield_now();
        }
        error
    }

    /// The error of a finished thread, if it is not about other ranks.
    fn own_failure(&mut self) -> Option<RuntimeError> {
        for (index, slot) in self.handles.iter_mut().enumerate() {
            let Some(handle) = slot.take_if(|handle| handle.is_finished()) else { continue };
            let reason = match handle.join() {
                Ok(Ok(())) => continue,
                Ok(Err(other)) if other.is_connection() => continue,
                Ok(Err(other)) => other.to_string(),
                Err(_) => "it panicked; please report this as a bug".to_owned(),
            };
            return Some(RuntimeError::RankFailed { rank: index + 1, reason });
        }
        None
    }
}

impl Drop for RankThreads {
    /// Waits for the threads, which end when rank 0 tells them to or leaves.
    fn drop(&mut self) {
        for handle in self.handles.drain(..).flatten() {
            // A failure was reported to rank 0 as its own.
            let _ = handle.join();
        }
    }
}

/// Serves as a rank other than 0 until rank 0 says stop.
///
/// # Errors
/// What this rank cannot load, or the failure of any rank.
pub fn serve(options: &EngineOptions, communicator: Communicator) -> Result<()> {
    Plan::new(options)?.rank(options, communicator, &mut |_, _| {})?.serve()
}

/// Refuses what no engine can be set up with.
fn check(options: &EngineOptions) -> Result<()> {
    let refuse = |what, got: String, limit: &str, advice| {
        Err(RuntimeError::Request { what, got, limit: limit.to_owned(), advice })
    };
    if !options.dtype.is_float() {
        let got = options.dtype.to_string();
        return refuse("the type of activations", got, "it must be a float", "take f32 or bf16");
    }
    if options.prefill_rows == 0 {
        let limit = "a prompt goes through in chunks of at least one";
        return refuse("prefill_rows", "0".to_owned(), limit, "take 256");
    }
    if options.sequences_max == 0 || options.sequences_max > SEQUENCES_MAX {
        let limit = format!("1 to {SEQUENCES_MAX} sequences are possible");
        return refuse("sequences_max", options.sequences_max.to_string(), &limit, "take 16");
    }
    if options.waiting_max == 0 {
        let limit = "a request waits before its first pass";
        return refuse("waiting_max", "0".to_owned(), limit, "take 1 or more");
    }
    Ok(())
}

/// Rows of the cache. `sequence_rows` are those of the longest sequence with a tree at its end.
fn slots(options: &EngineOptions, sequence_rows: usize, row_bytes: usize) -> Result<usize> {
    let sequence_rows = sequence_rows.next_multiple_of(PAGE_ROWS);
    let slots = match options.cache_tokens {
        0 => {
            let affordable = CACHE_DEFAULT_BYTES_MAX / row_bytes / sequence_rows;
            affordable.clamp(1, options.sequences_max) * sequence_rows
        }
        // Above the limit, which is a multiple of a page, rounding could overflow.
        asked => asked.min(SLOTS_MAX + 1).next_multiple_of(PAGE_ROWS),
    };
    match slots {
        ..=SLOTS_MAX => Ok(slots),
        _ => Err(RuntimeError::Request {
            what: "the cache",
            got: format!("{} tokens large", options.cache_tokens.max(slots)),
            limit: format!("{SLOTS_MAX} is the most"),
            advice: "ask for a smaller cache or a shorter context",
        }),
    }
}

fn context_max(options: &EngineOptions, config: &ModelConfig) -> Result<usize> {
    match options.context_max {
        0 => Ok(config.positions_max.min(CONTEXT_DEFAULT_MAX)),
        asked if asked > config.positions_max => Err(RuntimeError::Request {
            what: "the context",
            got: asked.to_string(),
            limit: format!("this model has {} positions", config.positions_max),
            advice: "ask for a shorter context",
        }),
        asked => Ok(asked),
    }
}

fn tree_rows_max(options: &EngineOptions) -> usize {
    let fed = |tree: &paceline_spec::TreeParameters| tree.topk() * (tree.depth() - 1);
    let trees = options.trees.iter().flat_map(|tree| [tree.nodes(), fed(tree)]);
    trees.chain([options.chain_drafted_max + 1]).max().unwrap_or(1)
}

/// Threads of one rank: its share of the cores, unless told otherwise.
fn threads(options: &EngineOptions, ranks: usize) -> usize {
    match options.threads {
        0 => {
            let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
            (cores / ranks).max(1)
        }
        asked => asked,
    }
}
