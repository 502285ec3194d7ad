//! Making [`DraftWeights`] of a checkpoint.
//!
//! Invariant: as for targets, every tensor of the file is known and every one that the
//! configuration calls for is there; and the vocabulary map leads to distinct ids of the target.
//! Start reading at [`DraftWeights::load`].

use paceline_kernels::{DType, Tensor, Weight};

use super::gather::gather;
use super::layout::draft_modules;
use super::loading::Loader;
use super::resolution::{Resolution, integers};
use super::{Checkpoint, DraftAttention, DraftWeights, GroupedAttentionWeights};
use crate::ModelError;
use crate::eagle3::config::DraftConfig;
use crate::shard::Parallel;

impl DraftWeights {
    /// The weights of a draft: all of them, whatever the number of ranks of its target.
    ///
    /// # Errors
    /// [`ModelError::CheckpointMismatch`] with every tensor that is missing, unknown or wrong;
    /// [`ModelError::DraftVocabulary`] for a vocabulary map that is none.
    pub fn load(checkpoint: &Checkpoint, config: &DraftConfig) -> Result<Self, ModelError> {
        let checkpoint = checkpoint.renamed(canonical)?;
        let modules = draft_modules(config);
        let mut resolution = Resolution::of_modules(&checkpoint, &modules);
        let extra = Extra::take(&mut resolution, config);
        resolution.finish(|_| false)?;
        let map = extra.vocabulary_map(config).map_err(|reason| ModelError::DraftVocabulary {
            name: checkpoint.name().to_owned(),
            reason,
        })?;
        let mut ignored = |_, _| ();
        let mut loader = Loader::new(&resolution, &modules, Parallel::SINGLE, &mut ignored)?;
        let states = if config.fc_norm { config.captured_states } else { 0 };
        let norm = |state| format!("fc_norm.{state}.weight");
        let attention = match config.mla_sizes() {
            Some(sizes) => DraftAttention::Mla(loader.attention("midlayer.", &sizes)?),
            None => DraftAttention::Llama(loader.grouped_attention("midlayer.self_attn.")?),
        };
        let mut weights = Self {
            captured_norm: config.norm_before_fc.then(|| loader.vector("input_norm.weight")),
            captured_norms: (0..states).map(|state| loader.vector(&norm(state))).collect(),
            fc: loader.matrix("fc")?,
            fc_bias: config.fc_bias.then(|| loader.vector("fc.bias")),
            embedding_norm: loader.vector("midlayer.input_layernorm.weight"),
            hidden_norm: loader.vector("midlayer.hidden_norm.weight"),
            attention,
            ffn_norm: loader.vector("midlayer.post_attention_layernorm.weight"),
            mlp: loader.mlp("midlayer.mlp.")?,
            final_norm: loader.vector("norm.weight"),
            head: extra.head.map(Weight::Float),
            embedding: extra.embedding,
            draft_to_target: map,
        };
        gather(&mut weights, 1);
        Ok(weights)
    }
}

impl Loader<'_> {
    fn grouped_attention(&mut self, prefix: &str) -> Result<GroupedAttentionWeights, ModelError> {
        Ok(GroupedAttentionWeights {
            query: self.matrix(&format!("{prefix}q_proj"))?,
            key: self.matrix(&format!("{prefix}k_proj"))?,
            value: self.matrix(&format!("{prefix}v_proj"))?,
            output: self.matrix(&format!("{prefix}o_proj"))?,
        })
    }
}

/// Published drafts spell the one layer in three ways, and the norms of captured states in two.
fn canonical(stored: &str) -> String {
    let name = stored.strip_prefix("model.").unwrap_or(stored);
    if let Some(rest) = name.strip_prefix("layers.0.") {
        return format!("midlayer.{rest}");
    }
    for (state, legacy) in ["aux_norm_low", "aux_norm_mid", "aux_norm_high"].iter().enumerate() {
        if let Some(rest) = name.strip_prefix(legacy) {
            return format!("fc_norm.{state}{rest}");
        }
    }
    name.to_owned()
}

/// The tensors that a draft may leave to its target.
struct Extra {
    head: Option<Tensor>,
    embedding: Option<Tensor>,
    /// `d2t`, `[Vd]`.
    map: Option<Tensor>,
    /// `t2d`, `[Vt]`: which ids of the target the draft can propose.
    proposable: Option<Tensor>,
}

impl Extra {
    /// Takes what is there; a draft with its own vocabulary needs its own head and map.
    fn take(resolution: &mut Resolution<'_>, config: &DraftConfig) -> Self {
        const FLOATS: &[DType] = &[DType::BF16, DType::F16, DType::F32];
        const INTEGERS: &[DType] = &[DType::I64, DType::I32];
        let (hidden, vocabulary) = (config.hidden, config.draft_vocabulary);
        let (head, table) = ([vocabulary, hidden], [config.vocabulary, hidden]);
        let reduced = vocabulary < config.vocabulary;
        // A shared head or embedding is as wide as the target.
        let own = hidden != config.target_hidden;
        let proposable = [DType::Bool, DType::U8, DType::I8];
        Self {
            head: match reduced || own {
                true => resolution.tensor("lm_head.weight", FLOATS, &head),
                false => resolution.optional("lm_head.weight", FLOATS, &head),
            },
            embedding: match own {
                true => resolution.tensor("embed_tokens.weight", FLOATS, &table),
                false => resolution.optional("embed_tokens.weight", FLOATS, &table),
            },
            map: match reduced {
                true => resolution.tensor("d2t", INTEGERS, &[vocabulary]),
                false => resolution.optional("d2t", INTEGERS, &[vocabulary]),
            },
            proposable: resolution.optional("t2d", &proposable, &[config.vocabulary]),
        }
    }

    /// The target's id of each id of the draft.
    fn vocabulary_map(&self, config: &DraftConfig) -> Result<Vec<u32>, String> {
        let identity = 0..u32::try_from(config.vocabulary).expect("vocabularies are bounded");
        let Some(map) = &self.map else { return Ok(identity.collect()) };
        let proposable = self.proposable.as_ref().map(flags);
        target_ids(&integers(map), config.vocabulary, proposable.as_deref())
    }
}

/// Reads `d2t`, which holds id(i) − i and sometimes id(i) itself. Ids ascend, and `t2d`, if there
/// is one, holds exactly them.
fn target_ids(
    map: &[i64],
    vocabulary: usize,
    proposable: Option<&[bool]>,
) -> Result<Vec<u32>, String> {
    let offsets = map.iter().zip(0i64..).map(|(offset, index)| offset.checked_add(index));
    let readings = [offsets.collect::<Option<Vec<i64>>>(), Some(map.to_vec())];
    for ids in readings.into_iter().flatten() {
        let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        let ids: Option<Vec<u32>> = ids.iter().map(|&id| u32::try_from(id).ok()).collect();
        let Some(ids) = ids.filter(|_| ascending) else { continue };
        let inside = ids.last().is_none_or(|&last| (last as usize) < vocabulary);
        let flagged = proposable.is_none_or(|flags| {
            inside
                && ids.iter().all(|&id| flags[id as usize])
                && flags.iter().filter(|&&flag| flag).count() == ids.len()
        });
        if inside && flagged {
            return Ok(ids);
        }
    }
    Err(format!(
        "d2t maps the {} ids of the draft to no ascending ids below {vocabulary}{}",
        map.len(),
        if proposable.is_some() { " that t2d marks" } else { "" }
    ))
}

fn flags(tensor: &Tensor) -> Vec<bool> {
    (0..tensor.rows()).flat_map(|row| tensor.row_bytes(row)).map(|&flag| flag != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_spellings_are_one() {
        for spelling in ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."] {
            let name = canonical(&format!("{spelling}self_attn.q_proj.weight"));
            assert_eq!(name, "midlayer.self_attn.q_proj.weight");
        }
        assert_eq!(canonical("model.norm.weight"), "norm.weight");
        assert_eq!(canonical("aux_norm_mid.weight"), "fc_norm.1.weight");
        assert_eq!(canonical("fc_norm.2.weight"), "fc_norm.2.weight");
        assert_eq!(canonical("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight");
    }

    #[test]
    fn maps_of_offsets_and_of_ids_are_read() {
        // Ids 1, 4, 5 of 8.
        let flags: Vec<bool> = (0..8).map(|id| [1, 4, 5].contains(&id)).collect();
        for map in [[1, 3, 3], [1, 4, 5]] {
            assert_eq!(target_ids(&map, 8, Some(&flags)).unwrap(), [1, 4, 5]);
        }
        assert_eq!(target_ids(&[1, 3, 3], 8, None).unwrap(), [1, 4, 5]);
        assert_eq!(target_ids(&[0, 0, 0], 3, None).unwrap(), [0, 1, 2]);
        for wrong in [[1, 3, 9], [-1, 3, 3], [2, 3, 3], [1, 0, -1], [i64::MAX, i64::MAX, 0]] {
            let error = target_ids(&wrong, 8, Some(&flags)).unwrap_err();
            assert!(error.contains("below 8"), "{error}");
        }
        // t2d that marks more ids than the draft has.
        assert!(target_ids(&[1, 3, 3], 8, Some(&[true; 8])).is_err());
    }
}
