//! Weights put together in memory of large pages, in the order in which a pass reads them.
//!
//! Views of a checkpoint lie in pages of 4 KiB, in the order of the file. Decoding streams all
//! weights once a token, so it then waits for address translation, and caches that are indexed by
//! physical addresses hold less (`docs/results/2026-12-01-epyc-2-cores/large-pages.txt`).
//! Invariant: values,
//! shapes and types stay; only where they lie changes. Start reading at [`gather`].

use std::sync::Arc;

use memmap2::MmapMut;
use paceline_kernels::{SharedBytes, Tensor, Weight};

use super::{AttentionWeights, DraftAttention, DraftWeights, Ffn, MlpWeights, ModelWeights, Query};

/// Weights of up to this size are gathered. Of larger ones a second copy would cost memory and
/// time to load that a user notices, and no cache holds a part of them worth having.
const GATHERED_BYTES_MAX: usize = 256 << 20;
/// Each tensor starts at a multiple of this.
const ALIGNMENT: usize = 64;
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Something that consists of tensors.
pub(super) trait Tensors {
    /// Calls `visit` on each, in the order in which a pass reads them.
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor));
}

/// Copies all tensors into one piece of memory, if they are not too large for that. Without
/// memory they stay where they are.
/// `ranks` is how many ranks copy theirs: the limit is on all of them together, since ranks share
/// what they do not copy.
pub(super) fn gather(weights: &mut dyn Tensors, ranks: usize) {
    let mut bytes = 0;
    weights.each(&mut |tensor| bytes += tensor.bytes().next_multiple_of(ALIGNMENT));
    if bytes == 0 || bytes.saturating_mul(ranks) > GATHERED_BYTES_MAX {
        return;
    }
    let Ok(mut memory) = MmapMut::map_anon(bytes.next_multiple_of(LARGE_PAGE_BYTES)) else {
        return;
    };
    #[cfg(target_os = "linux")]
    // Only advice: with pages of the usual size everything works, slower.
    let _ = memory.advise(memmap2::Advice::HugePage);
    let mut end = 0;
    weights.each(&mut |tensor| {
        let row_bytes = tensor.width() * tensor.dtype().bytes();
        if row_bytes > 0 {
            let place = &mut memory[end..end + tensor.bytes()];
            for (row, place) in place.chunks_exact_mut(row_bytes).enumerate() {
                place.copy_from_slice(tensor.row_bytes(row));
            }
        }
        end += tensor.bytes().next_multiple_of(ALIGNMENT);
    });
    let Ok(memory) = memory.make_read_only() else { return };
    let memory: SharedBytes = Arc::new(memory);
    let mut start = 0;
    weights.each(&mut |tensor| {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        let bytes = tensor.bytes().next_multiple_of(ALIGNMENT);
        let copy = Tensor::from_shared(dtype, &shape, memory.clone(), start);
        *tensor = copy.expect("the memory was made for all of them");
        start += bytes;
    });
}

impl Tensors for ModelWeights {
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        // A tied head is a view of the embedding and then copied with it twice; such models are
        // small.
        visit(&mut self.embedding);
        for layer in &mut self.layers {
            visit(&mut layer.attention_norm);
            layer.attention.each(visit);
            visit(&mut layer.ffn_norm);
            match &mut layer.ffn {
                Ffn::Dense(mlp) => mlp.each(visit),
                Ffn::Moe(moe) => {
                    moe.router.each(visit);
                    moe.bias.iter_mut().for_each(&mut *visit);
                    moe.shared.iter_mut().for_each(|mlp| mlp.each(visit));
                    moe.experts.iter_mut().for_each(|mlp| mlp.each(visit));
                }
            }
        }
        visit(&mut self.final_norm);
        self.head.each(visit);
    }
}

impl Tensors for DraftWeights {
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        self.embedding.iter_mut().for_each(&mut *visit);
        self.captured_norm.iter_mut().for_each(&mut *visit);
        self.captured_norms.iter_mut().for_each(&mut *visit);
        self.fc.each(visit);
        self.fc_bias.iter_mut().for_each(&mut *visit);
        visit(&mut self.embedding_norm);
        visit(&mut self.hidden_norm);
        match &mut self.attention {
            DraftAttention::Mla(attention) => attention.each(visit),
            DraftAttention::Llama(attention) => {
                for weight in [
                    &mut attention.query,
                    &mut attention.key,
                    &mut attention.value,
                    &mut attention.output,
                ] {
                    weight.each(visit);
                }
            }
        }
        visit(&mut self.ffn_norm);
        self.mlp.each(visit);
        visit(&mut self.final_norm);
        self.head.iter_mut().for_each(|head| head.each(visit));
    }
}

impl Tensors for AttentionWeights {
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        match &mut self.query {
            Query::Full(weight) => weight.each(visit),
            Query::LowRank { down, norm, up } => {
                down.each(visit);
                visit(norm);
                up.each(visit);
            }
        }
        self.kv_down.each(visit);
        visit(&mut self.kv_norm);
        self.key_up_transposed.each(visit);
        self.value_up.each(visit);
        self.output.each(visit);
        // Only prompts need it.
        self.key_up.each(visit);
    }
}

impl Tensors for MlpWeights {
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        for weight in [&mut self.gate, &mut self.up, &mut self.down] {
            weight.each(visit);
        }
    }
}

impl Tensors for Weight {
    fn each(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        match self {
            Self::Float(values) => visit(values),
            Self::Int4(weight) => {
                visit(&mut weight.packed);
                visit(&mut weight.scale);
            }
            Self::Fp8(weight) => {
                visit(&mut weight.codes);
                visit(&mut weight.scale);
            }
        }
    }
}
