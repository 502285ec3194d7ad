//! The forward pass of a DeepSeek-V3 family model on one rank.
//!
//! Invariant: every rank runs the same passes in the same order, and the residual stream is the
//! same on all of them; two all-reduces a layer keep it so. Start reading at [`Model::forward`].

use paceline_comm::{Communicator, ReduceOp};
use paceline_kernels::{
    DType, Stream, Tensor, Weight,
    ops::{
        cache::{gather_rows, move_slots},
        embed::embed,
        linear::{HeadLayout, linear_heads},
        norm::{add, rms_norm},
        rope::{Pairing, RopeAngles, copy_heads},
    },
};

use crate::{
    ModelError,
    config::{ModelConfig, RopeConfig},
    layers::{
        latent_attention::{LatentAttention, LatentSizes},
        moe::{FfnWorkspace, MoeLayer},
    },
    pass::Pass,
    shard::Parallel,
    weights::{AttentionWeights, Ffn, MlpWeights, ModelWeights},
};

/// How a [`Model`] is run.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Type of activations and cache: f32, bf16 or f16.
    pub dtype: DType,
    /// Most rows of a pass.
    pub rows_max: usize,
    /// Most rows of a pass whose logits are wanted.
    pub logit_rows_max: usize,
    /// Residual streams to keep for a draft: k is the one that enters layer k (ascending).
    pub capture_points: Vec<usize>,
}

/// One rank of a target model, with its weights and working memory.
pub struct Model {
    config: ModelConfig,
    options: ModelOptions,
    stream: Stream,
    communicator: Communicator,
    embedding: Tensor,
    layers: Vec<Layer>,
    final_norm: Tensor,
    head: Weight,
    attention: LatentAttention,
    ffn: FfnWorkspace,
    angles: RopeAngles,
    work: Workspace,
}

struct Layer {
    attention_norm: Tensor,
    attention: AttentionWeights,
    ffn_norm: Tensor,
    ffn: LayerFfn,
}

enum LayerFfn {
    Dense(Box<MlpWeights>),
    Experts(Box<MoeLayer>),
}

/// Activations of a pass.
struct Workspace {
    residual: Tensor,
    normed: Tensor,
    delta: Tensor,
    taps: Tensor,
    last: Tensor,
    last_normed: Tensor,
    /// This rank's share of the vocabulary, padded to the same width on every rank.
    logits_local: Tensor,
    logits_gathered: Tensor,
    logits: Tensor,
}

/// The paged latent cache of a model: for each layer `[slots, r + dr]`.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Tensor>,
}

impl KvCache {
    /// A cache of `slots` rows a layer.
    pub fn new(layers: usize, width: usize, slots: usize, dtype: DType) -> Self {
        let layers = (0..layers).map(|_| Tensor::zeros(dtype, &[slots, width])).collect();
        Self { layers }
    }

    /// Number of rows a layer.
    pub fn slots(&self) -> usize {
        self.layers.first().map_or(0, Tensor::rows)
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(Tensor::bytes).sum()
    }

    /// Copies rows from slot to slot in every layer, in the order given: what remains of a draft
    /// tree moves to where a chain would have put it.
    pub fn move_slots(&mut self, moves: &[(u32, u32)]) {
        for layer in &mut self.layers {
            move_slots(layer, moves);
        }
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut Tensor {
        &mut self.layers[layer]
    }
}

impl Model {
    /// Prepares a rank. `weights` must have been cut for `parallel`, and `communicator` must join
    /// that many ranks.
    ///
    /// # Errors
    /// [`ModelError::CapturePoints`] if a capture point lies beyond the model.
    pub fn new(
        config: ModelConfig,
        weights: ModelWeights,
        parallel: &Parallel,
        communicator: Communicator,
        stream: Stream,
        options: ModelOptions,
    ) -> Result<Self, ModelError> {
        let ascending = options.capture_points.is_sorted_by(|a, b| a < b);
        if !ascending || options.capture_points.iter().any(|&point| point > config.layers) {
            let reason = "they must ascend and lie in the model";
            let points = options.capture_points;
            return Err(ModelError::CapturePoints { points, layers: config.layers, reason });
        }
        let ranks = parallel.tensor;
        assert_eq!(communicator.world_size(), ranks, "one communicator rank for each shard");
        let ModelOptions { dtype, rows_max, .. } = options;
        let moe = config.moe.as_ref();
        let expert_width = moe.map_or(0, |moe| match parallel.expert_parallel {
            true => moe.intermediate,
            false => moe.intermediate / ranks,
        });
        let shared = moe.map_or(0, |moe| moe.shared_experts * moe.intermediate);
        let width_max = (config.intermediate.max(shared)).div_ceil(ranks);
        let hidden = config.hidden;
        let frequencies = config.rope.frequencies(config.qk_rope_head_dim);
        let pairing = pairing(&config.rope);
        Ok(Self {
            attention: LatentAttention::new(latent_sizes(&config, ranks), dtype, rows_max),
            ffn: FfnWorkspace::new(moe, hidden, width_max, expert_width, dtype, rows_max),
            angles: RopeAngles::new(frequencies, config.rope.attention_factor(), pairing, rows_max),
            work: Workspace::new(&config, &options, ranks),
            stream,
            communicator,
            embedding: weights.embedding,
            layers: weights.layers.into_iter().map(Layer::from).collect(),
            final_norm: weights.final_norm,
            head: weights.head,
            config,
            options,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How it is run.
    pub fn options(&self) -> &ModelOptions {
        &self.options
    }

    /// The embedding, `[vocabulary, hidden]`, which a draft shares.
    pub fn embedding(&self) -> &Tensor {
        &self.embedding
    }

    /// The output head, for a draft without one of its own; `None` when it is split over ranks.
    pub fn whole_head(&self) -> Option<&Weight> {
        (self.communicator.world_size() == 1).then_some(&self.head)
    }

    /// The stream that operators run on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The ranks' connection, with its counts of calls.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// The same, for control messages between passes.
    pub fn communicator_mut(&mut self) -> &mut Communicator {
        &mut self.communicator
    }

    /// A cache of `slots` rows for this model.
    pub fn cache(&self, slots: usize) -> KvCache {
        let width = self.config.latent_width();
        KvCache::new(self.config.layers, width, slots, self.options.dtype)
    }

    /// Runs one pass: writes its rows to `cache`, leaves logits and captured states in
    /// [`Model::logits`] and [`Model::taps`].
    ///
    /// # Errors
    /// [`ModelError::Comm`] if another rank failed.
    ///
    /// # Panics
    /// If the pass is inconsistent or larger than the options allow.
    pub fn forward(&mut self, pass: &Pass<'_>, cache: &mut KvCache) -> Result<(), ModelError> {
        pass.assert_consistent(cache.slots());
        assert!(pass.rows() > 0 && pass.rows() <= self.options.rows_max, "rows of the pass");
        assert!(pass.logit_rows.len() <= self.options.logit_rows_max, "rows with logits");
        let stream = self.stream.clone();
        stream.run(|| self.run(pass, cache))
    }

    /// f32 logits over the whole vocabulary, one row for each of the last pass's logit rows; the
    /// same bits on every rank.
    pub fn logits(&self) -> &Tensor {
        &self.work.logits
    }

    /// Captured residual streams of all rows of the last pass, `[rows, points · hidden]`.
    pub fn taps(&self) -> &Tensor {
        &self.work.taps
    }

    fn run(&mut self, pass: &Pass<'_>, cache: &mut KvCache) -> Result<(), ModelError> {
        self.work.set_rows(pass.rows());
        self.angles.set_positions(pass.positions);
        embed(&self.embedding, pass.tokens, &mut self.work.residual);
        for layer in 0..self.layers.len() {
            self.capture(layer);
            self.run_layer(layer, pass, cache)?;
        }
        self.capture(self.layers.len());
        if !pass.logit_rows.is_empty() {
            self.run_head(pass.logit_rows)?;
        }
        Ok(())
    }

    fn run_layer(
        &mut self,
        index: usize,
        pass: &Pass<'_>,
        cache: &mut KvCache,
    ) -> Result<(), ModelError> {
        let Self { stream, communicator, work, config, .. } = self;
        let Workspace { residual, normed, delta, .. } = work;
        let (layer, epsilon) = (&self.layers[index], config.rms_norm_eps);
        rms_norm(stream, residual, &layer.attention_norm, epsilon, normed, 0);
        self.attention.forward(
            stream,
            &layer.attention,
            normed,
            &self.angles,
            pass.segments,
            pass.form,
            cache.layer_mut(index),
            delta,
        );
        communicator.all_reduce(delta, ReduceOp::Sum, stream)?;
        add(stream, residual, delta);
        rms_norm(stream, residual, &layer.ffn_norm, epsilon, normed, 0);
        match &layer.ffn {
            LayerFfn::Dense(weights) => self.ffn.dense(stream, weights, normed, delta),
            LayerFfn::Experts(experts) => self.ffn.experts(stream, experts, normed, delta),
        }
        communicator.all_reduce(delta, ReduceOp::Sum, stream)?;
        add(stream, residual, delta);
        Ok(())
    }

    /// Keeps the residual stream that enters `layer`, if a draft wants it.
    fn capture(&mut self, layer: usize) {
        let Some(at) = self.options.capture_points.iter().position(|&point| point == layer) else {
            return;
        };
        let width = self.config.hidden;
        let from = HeadLayout { offset: 0, stride: 0 };
        let to = HeadLayout { offset: at * width, stride: 0 };
        copy_heads(&self.work.residual, from, &mut self.work.taps, to, 1, width);
    }

    fn run_head(&mut self, rows: &[u32]) -> Result<(), ModelError> {
        let Self { stream, communicator, work, .. } = self;
        for tensor in [&mut work.last, &mut work.last_normed, &mut work.logits] {
            tensor.set_rows(rows.len());
        }
        gather_rows(&work.residual, rows, 0, &mut work.last);
        let (norm, epsilon) = (&self.final_norm, self.config.rms_norm_eps);
        rms_norm(stream, &work.last, norm, epsilon, &mut work.last_normed, 0);
        let whole = HeadLayout { offset: 0, stride: 0 };
        if communicator.world_size() == 1 {
            let logits = &mut work.logits;
            linear_heads(stream, &work.last_normed, whole, &self.head, 1, logits, whole);
            return Ok(());
        }
        work.logits_local.set_rows(rows.len());
        let local = &mut work.logits_local;
        linear_heads(stream, &work.last_normed, whole, &self.head, 1, local, whole);
        work.logits_gathered.set_rows(communicator.world_size() * rows.len());
        communicator.all_gather(&work.logits_local, &mut work.logits_gathered, stream)?;
        join_vocabulary(&work.logits_gathered, communicator.world_size(), &mut work.logits);
        Ok(())
    }
}

/// From `[ranks, rows, share]` to `[rows, vocabulary]`; the last share may be padded.
fn join_vocabulary(gathered: &Tensor, ranks: usize, logits: &mut Tensor) {
    let (share, vocabulary, rows) = (gathered.width(), logits.width(), logits.rows());
    let gathered = gathered.as_slice::<f32>();
    for (row, whole) in logits.as_mut_slice::<f32>().chunks_exact_mut(vocabulary).enumerate() {
        for rank in 0..ranks {
            let start = (rank * share).min(vocabulary);
            let end = ((rank + 1) * share).min(vocabulary);
            let part = &gathered[(rank * rows + row) * share..][..end - start];
            whole[start..end].copy_from_slice(part);
        }
    }
}

impl Workspace {
    fn new(config: &ModelConfig, options: &ModelOptions, ranks: usize) -> Self {
        let ModelOptions { dtype, rows_max, logit_rows_max, .. } = *options;
        let rows = |width: usize| Tensor::zeros(dtype, &[rows_max, width]);
        let logits = |rows: usize, width| Tensor::zeros(DType::F32, &[rows, width]);
        let share = if ranks > 1 { config.vocabulary.div_ceil(ranks) } else { 0 };
        Self {
            residual: rows(config.hidden),
            normed: rows(config.hidden),
            delta: rows(config.hidden),
            taps: rows(config.hidden * options.capture_points.len()),
            last: Tensor::zeros(dtype, &[logit_rows_max, config.hidden]),
            last_normed: Tensor::zeros(dtype, &[logit_rows_max, config.hidden]),
            logits_local: logits(logit_rows_max, share),
            logits_gathered: logits(logit_rows_max * ranks, share),
            logits: logits(logit_rows_max, config.vocabulary),
        }
    }

    fn set_rows(&mut self, rows: usize) {
        for tensor in [&mut self.residual, &mut self.normed, &mut self.delta, &mut self.taps] {
            tensor.set_rows(rows);
        }
    }
}

impl From<crate::weights::LayerWeights> for Layer {
    fn from(weights: crate::weights::LayerWeights) -> Self {
        Self {
            attention_norm: weights.attention_norm,
            attention: weights.attention,
            ffn_norm: weights.ffn_norm,
            ffn: match weights.ffn {
                Ffn::Dense(mlp) => LayerFfn::Dense(Box::new(mlp)),
                Ffn::Moe(experts) => LayerFfn::Experts(Box::new(experts.into())),
            },
        }
    }
}

fn latent_sizes(config: &ModelConfig, ranks: usize) -> LatentSizes {
    LatentSizes {
        heads: config.heads / ranks,
        query_rank: config.q_lora_rank,
        rank: config.kv_lora_rank,
        nope: config.qk_nope_head_dim,
        rotary: config.qk_rope_head_dim,
        value: config.v_head_dim,
        epsilon: config.inner_norm_eps,
        scale: config.softmax_scale(),
    }
}

pub(crate) fn pairing(rope: &RopeConfig) -> Pairing {
    if rope.interleaved { Pairing::Interleaved } else { Pairing::HalfSplit }
}
