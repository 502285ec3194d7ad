//! Making [`ModelWeights`] of a checkpoint: resolve everything first, then cut what a rank needs.
//!
//! Invariant: nothing is loaded of a checkpoint with a problem, and no byte of a weight is read
//! that this rank does not need. Start reading at [`ModelWeights::load`].

use paceline_kernels::{KernelError, Tensor, Weight};

use super::gather::gather;
use super::layout::{Module, ModuleKind, model_modules, model_modules_count};
use super::resolution::{Resolution, is_prediction_layer};
use super::{
    AttentionWeights, Checkpoint, Ffn, LayerWeights, MlpWeights, ModelWeights, MoeWeights, Query,
    latent_split,
};
use crate::ModelError;
use crate::config::{MlaSizes, ModelConfig, MoeConfig, Selection};
use crate::shard::{Parallel, Split};

impl ModelWeights {
    /// The weights of one rank. `progress` is told the bytes done and the bytes in all, of this
    /// rank's part. Small models are then copied together; of large ones weights stay views and are
    /// read from disk when they are first used.
    ///
    /// # Errors
    /// [`ModelError::CheckpointMismatch`] with every tensor that is missing, unknown or wrong;
    /// [`ModelError::Split`] and [`ModelError::Rank`] for a split that does not work;
    /// [`ModelError::Weight`] for a packed weight that cannot be cut there.
    pub fn load(
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        parallel: &Parallel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        parallel.check(config)?;
        check_size(checkpoint, config)?;
        let modules = model_modules(config);
        let resolution = resolve_model(checkpoint, config, &modules);
        resolution.finish(is_prediction_layer(checkpoint, config.layers, config.mtp_layers))?;
        let mut loader = Loader::new(&resolution, &modules, *parallel, progress)?;
        let mut weights = loader.model(config)?;
        gather(&mut weights, parallel.tensor);
        Ok(weights)
    }
}

/// Refuses a configuration of far more modules than there are tensors, before a list is made of
/// them: an absurd number of layers or experts would make one of gigabytes.
pub(super) fn check_size(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), ModelError> {
    // Small models may lack most of their tensors and are still told each of them.
    const ALWAYS_LISTED: u64 = 10_000;
    let (modules, tensors) = (model_modules_count(config), checkpoint.len() as u64);
    if modules <= ALWAYS_LISTED.max(2 * tensors) {
        return Ok(());
    }
    let problem = format!(
        "its {} layers with {} experts need more than {modules} tensors, but its files hold \
         {tensors}",
        config.layers,
        config.moe.as_ref().map_or(0, |moe| moe.experts),
    );
    let name = checkpoint.name().to_owned();
    Err(ModelError::CheckpointMismatch { name, problems: vec![problem], count: 1 })
}

/// Everything that a target model calls for, found in a checkpoint.
pub(super) fn resolve_model<'a>(
    checkpoint: &'a Checkpoint,
    config: &ModelConfig,
    modules: &[Module],
) -> Resolution<'a> {
    let mut resolution = Resolution::of_modules(checkpoint, modules);
    if config.tied_embeddings {
        // Some files store the head although it is the embedding.
        resolution.ignore("lm_head.weight");
    }
    resolution
}

/// A rank's part of a weight, as a view; `None` if it needs nothing of it.
pub(super) fn cut(
    weight: &Weight,
    split: Split,
    parallel: &Parallel,
) -> Result<Option<Weight>, KernelError> {
    let (rows, columns) = (weight.out_features(), weight.in_features());
    let Some(part) = parallel.part(split, [rows, columns]) else { return Ok(None) };
    let mut view = weight.clone();
    if part.rows != (0..rows) {
        view = view.slice_rows(part.rows);
    }
    if part.columns != (0..columns) {
        view = view.slice_columns(part.columns)?;
    }
    Ok(Some(view))
}

/// Takes modules out of a resolution without problems, cut for a rank.
pub(super) struct Loader<'a> {
    resolution: &'a Resolution<'a>,
    parallel: Parallel,
    bytes_done: u64,
    bytes_total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Loader<'a> {
    pub(super) fn new(
        resolution: &'a Resolution<'a>,
        modules: &[Module],
        parallel: Parallel,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        let mut loader = Self { resolution, parallel, bytes_done: 0, bytes_total: 0, progress };
        for module in modules {
            let bytes = match module.kind {
                ModuleKind::Vector { .. } => resolution.vector(&module.name).map(Tensor::bytes),
                ModuleKind::Matrix { .. } => loader.part(&module.name)?.as_ref().map(Weight::bytes),
            };
            loader.bytes_total += bytes.unwrap_or(0) as u64;
        }
        Ok(loader)
    }

    fn model(&mut self, config: &ModelConfig) -> Result<ModelWeights, ModelError> {
        let embedding = self.table("model.embed_tokens")?;
        let layer = |loader: &mut Self, layer| loader.layer(config, layer);
        let layers =
            (0..config.layers).map(|index| layer(self, index)).collect::<Result<_, _>>()?;
        let final_norm = self.vector("model.norm.weight");
        let head_rows = self.parallel.vocabulary(config);
        let head = if config.tied_embeddings {
            Weight::Float(embedding.slice_rows(head_rows.clone()))
        } else {
            self.matrix("lm_head")?
        };
        Ok(ModelWeights { embedding, layers, final_norm, head, head_rows })
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<LayerWeights, ModelError> {
        let prefix = format!("model.layers.{layer}.");
        Ok(LayerWeights {
            attention_norm: self.vector(&format!("{prefix}input_layernorm.weight")),
            attention: self.attention(&prefix, &config.mla_sizes())?,
            ffn_norm: self.vector(&format!("{prefix}post_attention_layernorm.weight")),
            ffn: match &config.moe {
                Some(moe) if config.is_moe_layer(layer) => {
                    Ffn::Moe(self.experts(&format!("{prefix}mlp."), moe)?)
                }
                _ => Ffn::Dense(self.mlp(&format!("{prefix}mlp."))?),
            },
        })
    }

    pub(super) fn attention(
        &mut self,
        layer: &str,
        sizes: &MlaSizes,
    ) -> Result<AttentionWeights, ModelError> {
        let prefix = format!("{layer}self_attn.");
        let query = match sizes.q_lora_rank {
            Some(_) => Query::LowRank {
                down: self.matrix(&format!("{prefix}q_a_proj"))?,
                norm: self.vector(&format!("{prefix}q_a_layernorm.weight")),
                up: self.matrix(&format!("{prefix}q_b_proj"))?,
            },
            None => Query::Full(self.matrix(&format!("{prefix}q_proj"))?),
        };
        let up = self.matrix(&format!("{prefix}kv_b_proj"))?;
        let parts = latent_split::split(&up, sizes.qk_nope_head_dim, sizes.v_head_dim);
        Ok(AttentionWeights {
            query,
            kv_down: self.matrix(&format!("{prefix}kv_a_proj_with_mqa"))?,
            kv_norm: self.vector(&format!("{prefix}kv_a_layernorm.weight")),
            key_up: Weight::Float(parts.key_up),
            key_up_transposed: Weight::Float(parts.key_up_transposed),
            value_up: Weight::Float(parts.value_up),
            output: self.matrix(&format!("{prefix}o_proj"))?,
        })
    }

    fn experts(&mut self, prefix: &str, moe: &MoeConfig) -> Result<MoeWeights, ModelError> {
        let router = self.matrix(&format!("{prefix}gate"))?.dequantize();
        let bias = format!("{prefix}gate.e_score_correction_bias");
        let bias = (moe.selection == Selection::NoAuxTc).then(|| self.vector(&bias));
        let local = self.parallel.experts(moe.experts);
        let first_expert = local.start;
        let expert = |expert| self.mlp(&format!("{prefix}experts.{expert}."));
        let experts = local.map(expert).collect::<Result<_, _>>()?;
        let shared = match moe.shared_experts {
            0 => None,
            _ => Some(self.mlp(&format!("{prefix}shared_experts."))?),
        };
        let router = Weight::Float(router.into_shared());
        Ok(MoeWeights { router, bias, experts, first_expert, shared })
    }

    pub(super) fn mlp(&mut self, prefix: &str) -> Result<MlpWeights, ModelError> {
        Ok(MlpWeights {
            gate: self.matrix(&format!("{prefix}gate_proj"))?,
            up: self.matrix(&format!("{prefix}up_proj"))?,
            down: self.matrix(&format!("{prefix}down_proj"))?,
        })
    }

    /// A module that is known to be plain floats.
    fn table(&mut self, name: &str) -> Result<Tensor, ModelError> {
        Ok(match self.matrix(name)? {
            Weight::Float(values) => values,
            packed => packed.dequantize().into_shared(),
        })
    }

    pub(super) fn matrix(&mut self, name: &str) -> Result<Weight, ModelError> {
        let part = self.part(name)?;
        let part = part.expect("the layout lists this module, and this rank asks only for its own");
        self.advance(part.bytes());
        Ok(part)
    }

    /// A vector, widened to f32.
    pub(super) fn vector(&mut self, name: &str) -> Tensor {
        let vector = self.resolution.vector(name);
        let vector = vector.expect("the layout lists this vector and a resolution has all of it");
        self.advance(vector.bytes());
        Tensor::from_slice(vector.shape(), &vector.to_f32_vec()).into_shared()
    }

    fn part(&self, name: &str) -> Result<Option<Weight>, ModelError> {
        let Some((weight, split)) = self.resolution.matrix(name) else { return Ok(None) };
        let failed = |source| ModelError::Weight { name: name.to_owned(), source };
        cut(weight, split, &self.parallel).map_err(failed)
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        (self.progress)(self.bytes_done, self.bytes_total);
    }
}
