//! The forward pass of an EAGLE-3 draft network (EAGLE-3, section 3.1).
//!
//! A row pairs the hidden state of position i with the token of position i + 1 and predicts the
//! token of i + 2, so rows keep the position of their hidden state. The first pass over a position
//! takes the target's captured states through `fc`; later ones take the draft's own last state.
//! Invariant: the network knows nothing of trees or acceptance; it computes the rows it is given.

use paceline_kernels::{
    DType, Stream, Tensor, Weight,
    ops::{
        attention::{AttentionParameters, CacheHeads, RowRange, Visibility, attention},
        cache::{gather_rows, scatter_rows},
        embed::embed,
        linear::{HeadLayout, linear, linear_heads},
        norm::{add, rms_norm},
        rope::{Pairing, RopeAngles, copy_heads, rope},
        swiglu::swiglu,
    },
};

use crate::{
    ModelError,
    config::ModelConfig,
    eagle3::config::{DraftConfig, DraftKind},
    layers::latent_attention::{LatentAttention, LatentSizes},
    pass::{AttentionForm, Segment, assert_cover},
    weights::{DraftAttention, DraftWeights, GroupedAttentionWeights},
};

/// A draft network with its weights and working memory. Runs on one rank, unsharded.
pub struct Draft {
    config: DraftConfig,
    dtype: DType,
    rows_max: usize,
    weights: DraftWeights,
    embedding: Tensor,
    head: Weight,
    attention: Attention,
    angles: RopeAngles,
    work: Workspace,
}

enum Attention {
    Grouped(Box<GroupedAttention>),
    Latent(Box<LatentAttention>),
}

/// Rows of one pass of the draft, of one or several sequences.
#[derive(Clone, Copy, Debug)]
pub struct DraftPass<'a> {
    /// Token of each row: the one that follows the position of its hidden state. Target ids.
    pub tokens: &'a [u32],
    /// Hidden states, one a row.
    pub states: DraftStates<'a>,
    /// Position of each row's hidden state.
    pub positions: &'a [u32],
    /// Where the rows' keys live and what they see: the sequences, in the order of their rows;
    /// together they cover all rows.
    pub segments: &'a [Segment<'a>],
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: &'a [u32],
}

/// The hidden states that a draft pass starts from.
#[derive(Clone, Copy, Debug)]
pub enum DraftStates<'a> {
    /// Captured residual streams of the target, `[rows, 3 · target hidden]`.
    Captured(&'a Tensor),
    /// The rows of the last pass's own states ([`Draft::states`]) to go on from.
    Recurrent(&'a [u32]),
}

struct Workspace {
    captured_normed: Tensor,
    state: Tensor,
    embedded: Tensor,
    joined: Tensor,
    delta: Tensor,
    normed: Tensor,
    activated: Tensor,
    states: Tensor,
    last: Tensor,
    last_normed: Tensor,
    logits: Tensor,
}

impl Draft {
    /// Prepares a draft. `embedding` and `head` are the target's, used where the draft's files
    /// hold none of their own. Passes have at most `rows_max` rows, all of which may have logits.
    ///
    /// # Errors
    /// As [`DraftConfig::check_target`], and [`ModelError::DraftMismatch`] if the weights do not
    /// fit this target.
    pub fn new(
        config: DraftConfig,
        weights: DraftWeights,
        target: &ModelConfig,
        embedding: &Tensor,
        head: Option<&Weight>,
        dtype: DType,
        rows_max: usize,
    ) -> Result<Self, ModelError> {
        let mismatch = |what, draft, target| Err(ModelError::DraftMismatch { what, draft, target });
        config.check_target(target)?;
        let embedding = weights.embedding.as_ref().unwrap_or(embedding).clone();
        if embedding.width() != config.hidden {
            return mismatch("embedding width", config.hidden, embedding.width());
        }
        let Some(head) = weights.head.clone().or_else(|| head.cloned()) else {
            return mismatch("output head (the draft has none of its own)", 0, 0);
        };
        if head.in_features() != config.hidden || head.out_features() != config.draft_vocabulary {
            return mismatch("output head rows", config.draft_vocabulary, head.out_features());
        }
        let attention = Attention::new(&config, dtype, rows_max);
        let (dim, pairing) = match config.kind {
            DraftKind::Llama { head_dim, .. } => (head_dim, Pairing::HalfSplit),
            DraftKind::Mla { qk_rope_head_dim, .. } => {
                (qk_rope_head_dim, crate::forward::pairing(&config.rope))
            }
        };
        let frequencies = config.rope.frequencies(dim);
        let factor = config.rope.attention_factor();
        Ok(Self {
            angles: RopeAngles::new(frequencies, factor, pairing, rows_max),
            work: Workspace::new(&config, dtype, rows_max),
            config,
            dtype,
            rows_max,
            weights,
            embedding,
            head,
            attention,
        })
    }

    /// The draft's configuration.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// The target's id of a token of the draft's vocabulary.
    pub fn target_token(&self, draft_token: u32) -> u32 {
        self.weights.draft_to_target[draft_token as usize]
    }

    /// Values of a row of the cache: keys then values of all heads, or a latent row.
    pub fn cache_width(&self) -> usize {
        match self.config.kind {
            DraftKind::Llama { kv_heads, head_dim } => 2 * kv_heads * head_dim,
            DraftKind::Mla { kv_lora_rank, qk_rope_head_dim, .. } => {
                kv_lora_rank + qk_rope_head_dim
            }
        }
    }

    /// A cache of `slots` rows.
    pub fn cache(&self, slots: usize) -> Tensor {
        Tensor::zeros(self.dtype, &[slots, self.cache_width()])
    }

    /// f32 logits over the draft's vocabulary, one row for each of the last pass's logit rows.
    pub fn logits(&self) -> &Tensor {
        &self.work.logits
    }

    /// Hidden states of the last pass's rows, `[rows, hidden]`: input of recurrent passes.
    pub fn states(&self) -> &Tensor {
        &self.work.states
    }

    /// Runs one pass: writes its rows to `cache`, leaves logits and states behind.
    ///
    /// # Panics
    /// If the pass is inconsistent or has more rows than the draft was prepared for.
    pub fn forward(&mut self, stream: &Stream, pass: &DraftPass<'_>, cache: &mut Tensor) {
        let rows = pass.tokens.len();
        assert!(rows > 0 && rows <= self.rows_max && pass.positions.len() == rows);
        assert_cover(pass.segments, rows, cache.rows());
        stream.run(|| self.run(stream, pass, cache));
    }

    fn run(&mut self, stream: &Stream, pass: &DraftPass<'_>, cache: &mut Tensor) {
        self.start_states(stream, pass);
        self.work.set_rows(pass.tokens.len());
        self.angles.set_positions(pass.positions);
        let epsilon = self.config.rms_norm_eps;
        let (weights, work) = (&self.weights, &mut self.work);
        embed(&self.embedding, pass.tokens, &mut work.embedded);
        let joined = &mut work.joined;
        rms_norm(stream, &work.embedded, &weights.embedding_norm, epsilon, joined, 0);
        let width = self.config.hidden;
        rms_norm(stream, &work.state, &weights.hidden_norm, epsilon, joined, width);
        if self.config.norm_before_residual {
            rms_norm(stream, &work.state, &weights.hidden_norm, epsilon, &mut work.normed, 0);
            std::mem::swap(&mut work.state, &mut work.normed);
        }
        let (segments, angles) = (pass.segments, &self.angles);
        let (joined, delta) = (&work.joined, &mut work.delta);
        match (&mut self.attention, &weights.attention) {
            (Attention::Grouped(attention), DraftAttention::Llama(weights)) => {
                attention.forward(stream, weights, joined, angles, segments, cache, delta);
            }
            (Attention::Latent(attention), DraftAttention::Mla(weights)) => {
                let form = AttentionForm::Absorbed;
                attention.forward(stream, weights, joined, angles, segments, form, cache, delta);
            }
            _ => unreachable!("attention was made for these weights"),
        }
        add(stream, &mut work.state, &work.delta);
        rms_norm(stream, &work.state, &weights.ffn_norm, epsilon, &mut work.normed, 0);
        let mlp = &weights.mlp;
        swiglu(stream, &work.normed, &mlp.gate, &mlp.up, &mut work.activated);
        linear(stream, &work.activated, &mlp.down, &mut work.delta);
        add(stream, &mut work.state, &work.delta);
        self.finish(stream, pass.logit_rows);
    }

    /// Leaves the rows' hidden states in `work.state`.
    fn start_states(&mut self, stream: &Stream, pass: &DraftPass<'_>) {
        let rows = pass.tokens.len();
        let Self { weights, work, config, .. } = self;
        work.state.set_rows(rows);
        let captured = match pass.states {
            DraftStates::Recurrent(rows_before) => {
                assert_eq!(rows_before.len(), rows);
                gather_rows(&work.states, rows_before, 0, &mut work.state);
                return;
            }
            DraftStates::Captured(captured) => captured,
        };
        assert_eq!(captured.rows(), rows);
        let epsilon = config.rms_norm_eps;
        let input = if let Some(norm) = &weights.captured_norm {
            work.captured_normed.set_rows(rows);
            rms_norm(stream, captured, norm, epsilon, &mut work.captured_normed, 0);
            &work.captured_normed
        } else if weights.captured_norms.is_empty() {
            captured
        } else {
            work.captured_normed.set_rows(rows);
            let width = config.target_hidden;
            for (index, norm) in weights.captured_norms.iter().enumerate() {
                work.embedded.reshape(&[rows, width]);
                let from = HeadLayout { offset: index * width, stride: 0 };
                let to = HeadLayout { offset: 0, stride: 0 };
                copy_heads(captured, from, &mut work.embedded, to, 1, width);
                let out = &mut work.captured_normed;
                rms_norm(stream, &work.embedded, norm, epsilon, out, index * width);
            }
            &work.captured_normed
        };
        linear(stream, input, &weights.fc, &mut work.state);
        if let Some(bias) = &weights.fc_bias {
            add_bias(&mut work.state, bias);
        }
    }

    /// From the layer's output to the recurrent states and the logits.
    fn finish(&mut self, stream: &Stream, logit_rows: &[u32]) {
        let Self { weights, work, config, .. } = self;
        let (norm, epsilon) = (&weights.final_norm, config.rms_norm_eps);
        let whole = HeadLayout { offset: 0, stride: 0 };
        work.states.set_rows(work.state.rows());
        if config.norm_output {
            rms_norm(stream, &work.state, norm, epsilon, &mut work.states, 0);
        } else {
            copy_heads(&work.state, whole, &mut work.states, whole, 1, config.hidden);
        }
        for tensor in [&mut work.last, &mut work.last_normed, &mut work.logits] {
            tensor.set_rows(logit_rows.len());
        }
        if logit_rows.is_empty() {
            return;
        }
        gather_rows(&work.state, logit_rows, 0, &mut work.last);
        rms_norm(stream, &work.last, norm, epsilon, &mut work.last_normed, 0);
        linear_heads(stream, &work.last_normed, whole, &self.head, 1, &mut work.logits, whole);
    }
}

/// Adds an f32 bias to each row.
fn add_bias(x: &mut Tensor, bias: &Tensor) {
    fn apply<T: paceline_kernels::Float>(x: &mut Tensor, bias: &[f32]) {
        for row in x.as_mut_slice::<T>().chunks_exact_mut(bias.len()) {
            for (value, &bias) in row.iter_mut().zip(bias) {
                *value = T::from_f32(value.to_f32() + bias);
            }
        }
    }
    let bias = bias.as_slice::<f32>();
    match x.dtype() {
        DType::F32 => apply::<f32>(x, bias),
        DType::BF16 => apply::<half::bf16>(x, bias),
        DType::F16 => apply::<half::f16>(x, bias),
        other => panic!("bias on {other}"),
    }
}

/// Grouped-query attention with half-split rotary pairs, as in Llama.
struct GroupedAttention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    slots: Vec<u32>,
}

impl GroupedAttention {
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &mut self,
        stream: &Stream,
        weights: &GroupedAttentionWeights,
        input: &Tensor,
        angles: &RopeAngles,
        segments: &[Segment<'_>],
        cache: &mut Tensor,
        out: &mut Tensor,
    ) {
        for tensor in [&mut self.query, &mut self.key, &mut self.value, &mut self.mixed] {
            tensor.set_rows(input.rows());
        }
        linear(stream, input, &weights.query, &mut self.query);
        linear(stream, input, &weights.key, &mut self.key);
        linear(stream, input, &weights.value, &mut self.value);
        let layout = HeadLayout { offset: 0, stride: self.head_dim };
        rope(stream, &mut self.query, layout, self.heads, angles);
        rope(stream, &mut self.key, layout, self.kv_heads, angles);
        let values_at = self.kv_heads * self.head_dim;
        self.slots.clear();
        for segment in segments {
            self.slots.extend_from_slice(segment.new_slots());
        }
        scatter_rows(&self.key, &self.slots, cache, 0);
        scatter_rows(&self.value, &self.slots, cache, values_at);
        let (stride, width) = (self.head_dim, self.head_dim);
        for segment in segments {
            let Segment { first_row, rows, context, earlier, slots, paths } = *segment;
            let parameters = AttentionParameters {
                heads: self.heads,
                heads_per_key: self.heads / self.kv_heads,
                keys: CacheHeads { rows: cache, offset: 0, stride, width },
                values: CacheHeads { rows: cache, offset: values_at, stride, width },
                scale: self.scale,
                visibility: Visibility { slots, context, earlier, paths },
                rows: RowRange { start: first_row, end: first_row + rows },
            };
            attention(stream, &self.query, &parameters, &mut self.mixed);
        }
        linear(stream, &self.mixed, &weights.output, out);
    }
}

impl Attention {
    fn new(config: &DraftConfig, dtype: DType, rows_max: usize) -> Self {
        let heads = config.heads;
        match config.kind {
            DraftKind::Llama { kv_heads, head_dim } => {
                let rows = |width: usize| Tensor::zeros(dtype, &[rows_max, width]);
                Self::Grouped(Box::new(GroupedAttention {
                    heads,
                    kv_heads,
                    head_dim,
                    scale: config.softmax_scale(),
                    query: rows(heads * head_dim),
                    key: rows(kv_heads * head_dim),
                    value: rows(kv_heads * head_dim),
                    mixed: rows(heads * head_dim),
                    slots: Vec::with_capacity(rows_max),
                }))
            }
            DraftKind::Mla {
                q_lora_rank,
                kv_lora_rank,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
            } => {
                let sizes = LatentSizes {
                    heads,
                    query_rank: q_lora_rank,
                    rank: kv_lora_rank,
                    nope: qk_nope_head_dim,
                    rotary: qk_rope_head_dim,
                    value: v_head_dim,
                    epsilon: config.rms_norm_eps,
                    scale: config.softmax_scale(),
                };
                Self::Latent(Box::new(LatentAttention::new(sizes, dtype, rows_max)))
            }
        }
    }
}

impl Workspace {
    fn new(config: &DraftConfig, dtype: DType, rows_max: usize) -> Self {
        let rows = |width: usize| Tensor::zeros(dtype, &[rows_max, width]);
        let captured = config.captured_states * config.target_hidden;
        let embedded = config.hidden.max(config.target_hidden);
        Self {
            captured_normed: rows(captured),
            state: rows(config.hidden),
            embedded: rows(embedded),
            joined: rows(2 * config.hidden),
            delta: rows(config.hidden),
            normed: rows(config.hidden),
            activated: rows(config.intermediate),
            states: rows(config.hidden),
            last: rows(config.hidden),
            last_normed: rows(config.hidden),
            logits: Tensor::zeros(DType::F32, &[rows_max, config.draft_vocabulary]),
        }
    }

    fn set_rows(&mut self, rows: usize) {
        let width = self.state.width();
        self.embedded.reshape(&[rows, width]);
        for tensor in [
            &mut self.state,
            &mut self.joined,
            &mut self.delta,
            &mut self.normed,
            &mut self.activated,
        ] {
            tensor.set_rows(rows);
        }
    }
}
