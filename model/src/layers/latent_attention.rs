//! Multi-head latent attention (DeepSeek-V2, section 2.1), of targets and of MLA drafts.

use paceline_kernels::{
    DType, Stream, Tensor,
    ops::{
        attention::{AttentionParameters, CacheHeads, RowRange, Visibility, attention},
        cache::{gather_rows, store_latent},
        linear::{HeadLayout, linear, linear_heads},
        norm::rms_norm,
        rope::{RopeAngles, copy_heads, rope},
    },
};

use crate::{
    pass::{AttentionForm, Segment},
    weights::{AttentionWeights, Query},
};

/// Sizes of the heads that one rank computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentSizes {
    /// Heads of this rank.
    pub(crate) heads: usize,
    /// Width of the compressed query, if there is one.
    pub(crate) query_rank: Option<usize>,
    /// Width of the compressed keys and values (r).
    pub(crate) rank: usize,
    /// Part of a head without position (dn).
    pub(crate) nope: usize,
    /// Part of a head with rotary position (dr).
    pub(crate) rotary: usize,
    /// Width of a value head (dv).
    pub(crate) value: usize,
    /// Epsilon of the norms inside attention.
    pub(crate) epsilon: f32,
    /// Factor on the scores.
    pub(crate) scale: f32,
}

/// Working memory of attention; serves all layers.
pub(crate) struct LatentAttention {
    sizes: LatentSizes,
    query_down: Tensor,
    query_normed: Tensor,
    query: Tensor,
    latent: Tensor,
    query_absorbed: Tensor,
    latent_mixed: Tensor,
    mixed: Tensor,
    expanded: Expanded,
    slots: Vec<u32>,
}

/// Keys and values of a whole sequence; grows to the longest prompt seen.
struct Expanded {
    latent: Tensor,
    rotary: Tensor,
    keys: Tensor,
    values: Tensor,
    identity: Vec<u32>,
    capacity: usize,
}

impl LatentAttention {
    /// Working memory for passes of at most `rows_max` rows.
    pub(crate) fn new(sizes: LatentSizes, dtype: DType, rows_max: usize) -> Self {
        let LatentSizes { heads, rank, nope, rotary, value, .. } = sizes;
        let rows = |width: usize| Tensor::zeros(dtype, &[rows_max, width]);
        let query_rank = sizes.query_rank.unwrap_or(0);
        Self {
            sizes,
            query_down: rows(query_rank),
            query_normed: rows(query_rank),
            query: rows(heads * (nope + rotary)),
            latent: rows(rank + rotary),
            query_absorbed: rows(heads * (rank + rotary)),
            latent_mixed: rows(heads * rank),
            mixed: rows(heads * value),
            expanded: Expanded::new(&sizes, dtype, 0),
            slots: Vec::with_capacity(rows_max),
        }
    }

    /// out = attention of `input` `[rows, width]`; on each rank the partial sum of its heads.
    /// Writes the rows' latent keys to `cache` first.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn forward(
        &mut self,
        stream: &Stream,
        weights: &AttentionWeights,
        input: &Tensor,
        angles: &RopeAngles,
        segments: &[Segment<'_>],
        form: AttentionForm,
        cache: &mut Tensor,
        out: &mut Tensor,
    ) {
        self.set_rows(input.rows());
        self.project_query(stream, weights, input, angles);
        linear(stream, input, &weights.kv_down, &mut self.latent);
        self.slots.clear();
        for segment in segments {
            self.slots.extend_from_slice(segment.new_slots());
        }
        let (norm, epsilon) = (&weights.kv_norm, self.sizes.epsilon);
        store_latent(stream, &self.latent, norm, epsilon, angles, &self.slots, cache);
        match form {
            AttentionForm::Absorbed => self.attend_absorbed(stream, weights, segments, cache),
            AttentionForm::Expanded => {
                for segment in segments {
                    self.attend_expanded(stream, weights, segment, cache);
                }
            }
        }
        linear(stream, &self.mixed, &weights.output, out);
    }

    fn set_rows(&mut self, rows: usize) {
        for tensor in [
            &mut self.query_down,
            &mut self.query_normed,
            &mut self.query,
            &mut self.latent,
            &mut self.query_absorbed,
            &mut self.latent_mixed,
            &mut self.mixed,
        ] {
            tensor.set_rows(rows);
        }
    }

    /// Queries of all heads, with rotary position.
    fn project_query(
        &mut self,
        stream: &Stream,
        weights: &AttentionWeights,
        input: &Tensor,
        angles: &RopeAngles,
    ) {
        let LatentSizes { heads, nope, rotary, epsilon, .. } = self.sizes;
        match &weights.query {
            Query::Full(weight) => linear(stream, input, weight, &mut self.query),
            Query::LowRank { down, norm, up } => {
                linear(stream, input, down, &mut self.query_down);
                rms_norm(stream, &self.query_down, norm, epsilon, &mut self.query_normed, 0);
                linear(stream, &self.query_normed, up, &mut self.query);
            }
        }
        let rotary_part = HeadLayout { offset: nope, stride: nope + rotary };
        rope(stream, &mut self.query, rotary_part, heads, angles);
    }

    /// Queries go into the latent space, values come out of it; all heads share the cache's rows.
    fn attend_absorbed(
        &mut self,
        stream: &Stream,
        weights: &AttentionWeights,
        segments: &[Segment<'_>],
        cache: &Tensor,
    ) {
        let LatentSizes { heads, rank, nope, rotary, value, scale, .. } = self.sizes;
        let query = HeadLayout { offset: 0, stride: nope + rotary };
        let absorbed = HeadLayout { offset: 0, stride: rank + rotary };
        let up = &weights.key_up_transposed;
        linear_heads(stream, &self.query, query, up, heads, &mut self.query_absorbed, absorbed);
        let rotary_part = HeadLayout { offset: nope, ..query };
        let rotary_absorbed = HeadLayout { offset: rank, ..absorbed };
        let target = &mut self.query_absorbed;
        copy_heads(&self.query, rotary_part, target, rotary_absorbed, heads, rotary);
        for segment in segments {
            let parameters = AttentionParameters {
                heads,
                heads_per_key: heads,
                keys: CacheHeads { rows: cache, offset: 0, stride: 0, width: rank + rotary },
                values: CacheHeads { rows: cache, offset: 0, stride: 0, width: rank },
                scale,
                visibility: visibility(segment, segment.slots),
                rows: rows_of(segment),
            };
            attention(stream, &self.query_absorbed, &parameters, &mut self.latent_mixed);
        }
        let latent = HeadLayout { offset: 0, stride: rank };
        let values = HeadLayout { offset: 0, stride: value };
        let (mixed, up) = (&mut self.mixed, &weights.value_up);
        linear_heads(stream, &self.latent_mixed, latent, up, heads, mixed, values);
    }

    /// Keys and values of every head are made from the latent rows of the whole sequence.
    fn attend_expanded(
        &mut self,
        stream: &Stream,
        weights: &AttentionWeights,
        segment: &Segment<'_>,
        cache: &Tensor,
    ) {
        let LatentSizes { heads, nope, rotary, value, scale, .. } = self.sizes;
        let count = segment.context + segment.earlier + segment.rows;
        self.expanded.reserve(&self.sizes, cache.dtype(), count);
        self.expanded.fill(stream, &self.sizes, weights, cache, &segment.slots[..count]);
        let Expanded { keys, values, identity, .. } = &self.expanded;
        let stride = nope + rotary;
        let parameters = AttentionParameters {
            heads,
            heads_per_key: 1,
            keys: CacheHeads { rows: keys, offset: 0, stride, width: stride },
            values: CacheHeads { rows: values, offset: 0, stride: value, width: value },
            scale,
            visibility: visibility(segment, &identity[..count]),
            rows: rows_of(segment),
        };
        attention(stream, &self.query, &parameters, &mut self.mixed);
    }
}

impl Expanded {
    fn new(sizes: &LatentSizes, dtype: DType, capacity: usize) -> Self {
        let rows = |width: usize| Tensor::zeros(dtype, &[capacity, width]);
        Self {
            latent: rows(sizes.rank),
            rotary: rows(sizes.rotary),
            keys: rows(sizes.heads * (sizes.nope + sizes.rotary)),
            values: rows(sizes.heads * sizes.value),
            identity: (0..capacity as u32).collect(),
            capacity,
        }
    }

    /// Makes room for a sequence of `count` rows; prompts grow it, decoding never does.
    fn reserve(&mut self, sizes: &LatentSizes, dtype: DType, count: usize) {
        if count > self.capacity {
            *self = Self::new(sizes, dtype, count.next_multiple_of(256));
        }
        for tensor in [&mut self.latent, &mut self.rotary, &mut self.keys, &mut self.values] {
            tensor.set_rows(count);
        }
    }

    fn fill(
        &mut self,
        stream: &Stream,
        sizes: &LatentSizes,
        weights: &AttentionWeights,
        cache: &Tensor,
        slots: &[u32],
    ) {
        let LatentSizes { heads, rank, nope, rotary, .. } = *sizes;
        gather_rows(cache, slots, 0, &mut self.latent);
        gather_rows(cache, slots, rank, &mut self.rotary);
        let shared = HeadLayout { offset: 0, stride: 0 };
        let key = HeadLayout { offset: 0, stride: nope + rotary };
        linear_heads(stream, &self.latent, shared, &weights.key_up, heads, &mut self.keys, key);
        let rotary_part = HeadLayout { offset: nope, ..key };
        copy_heads(&self.rotary, shared, &mut self.keys, rotary_part, heads, rotary);
        linear(stream, &self.latent, &weights.value_up, &mut self.values);
    }
}

fn visibility<'a>(segment: &Segment<'a>, slots: &'a [u32]) -> Visibility<'a> {
    let Segment { context, earlier, paths, .. } = *segment;
    Visibility { slots, context, earlier, paths }
}

fn rows_of(segment: &Segment<'_>) -> RowRange {
    RowRange { start: segment.first_row, end: segment.first_row + segment.rows }
}
