//! Synthetic checkpoints: deterministic weights from names, for tests and measurements.
//!
//! A [`Synthetic`] is a complete checkpoint in memory, of any configuration, whose values can be
//! made again anywhere from the tensors' names. It can be changed at will (to see what a loader
//! says) and written as one file or as shards with an index. Start reading at
//! [`Synthetic::model`].
//!
//! ```
//! use paceline_model::synthetic::{Synthetic, TinyModel};
//! use paceline_model::weights::Checkpoint;
//!
//! let directory = tempfile::tempdir()?;
//! Synthetic::model(TinyModel::A).write(directory.path(), 3)?;
//! assert_eq!(Checkpoint::open(directory.path())?.len(), 201);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use half::bf16;
use paceline_kernels::{DType, INT4_GROUP};
use safetensors::{Dtype, View};
use serde_json::{Map, Value, json};

use crate::ModelError;
use crate::config::ModelConfig;
use crate::eagle3::config::DraftConfig;
use crate::weights::layout::{Module, ModuleKind, draft_modules, model_modules};

mod hash;
mod presets;

pub use presets::{TinyDraft, TinyModel};

/// A checkpoint in memory.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Its `config.json`.
    pub config: Value,
    /// Its tensors.
    pub tensors: Vec<SyntheticTensor>,
}

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements, row-major and little-endian.
    pub bytes: Vec<u8>,
}

/// How the matrices of a synthetic model are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// f32 everywhere.
    F32,
    /// Routed experts as packed INT4 in groups of 32, as Kimi-K2.5; the rest f32.
    Int4Experts,
    /// All matrices but embedding, head and routers as FP8 blocks, as DeepSeek-V3; the rest f32.
    Fp8,
}

impl Synthetic {
    /// A tiny model with the weights that published golden values are based on.
    pub fn model(tiny: TinyModel) -> Self {
        let storage = match tiny {
            TinyModel::AFp8 => Storage::Fp8,
            TinyModel::CInt4 => Storage::Int4Experts,
            _ => Storage::F32,
        };
        Self::of_config(tiny.config(), storage).expect("tiny configurations are valid")
    }

    /// A model of any configuration.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`].
    pub fn of_config(config: Value, storage: Storage) -> Result<Self, ModelError> {
        let modules = model_modules(&ModelConfig::from_json(&config.to_string())?);
        let tensors = modules.iter().flat_map(|module| stored(module, storage, "")).collect();
        Ok(Self { config, tensors })
    }

    /// A tiny draft of [`TinyModel::A`]; its ids are the ids 1, 5, 9, … of the target.
    pub fn draft(tiny: TinyDraft) -> Self {
        let config = tiny.config();
        let parsed = DraftConfig::from_json(&config.to_string());
        let parsed = parsed.expect("tiny configurations are valid");
        let mut modules = draft_modules(&parsed);
        let shape = [parsed.draft_vocabulary, parsed.hidden];
        modules.push(Module {
            name: "lm_head".to_owned(),
            kind: ModuleKind::Matrix { shape, quantizable: false },
            split: crate::shard::Split::Replicated,
        });
        let prefix = tiny.prefix();
        let mut tensors: Vec<_> =
            modules.iter().flat_map(|module| stored(module, Storage::F32, prefix)).collect();
        let count = parsed.draft_vocabulary;
        let offsets = (0..count as i64).flat_map(|id| (3 * id + 1).to_le_bytes());
        tensors.push(SyntheticTensor::new("d2t", DType::I64, &[count], offsets));
        let flags = (0..parsed.vocabulary).map(|id| u8::from(id % 4 == 1 && id / 4 < count));
        tensors.push(SyntheticTensor::new("t2d", DType::Bool, &[parsed.vocabulary], flags));
        Self { config, tensors }
    }

    /// [`TinyModel::CInt4`] with the names and the configuration of Kimi-K2.5: everything under
    /// `language_model.`, and with parts that a text model skips.
    pub fn kimi_k25() -> Self {
        let mut synthetic = Self::model(TinyModel::CInt4);
        synthetic.config = presets::kimi_k25();
        for tensor in &mut synthetic.tensors {
            tensor.name.insert_str(0, "language_model.");
        }
        let mut skip = |name: &str, shape: &[usize]| {
            let bytes = vec![0; shape.iter().product::<usize>() * DType::BF16.bytes()];
            synthetic.tensors.push(SyntheticTensor::new(name, DType::BF16, shape, bytes));
        };
        skip("language_model.model.layers.0.self_attn.rotary_emb.inv_freq", &[32]);
        skip("vision_tower.patch_embed.proj.weight", &[2, 3, 1, 2, 2]);
        skip("vision_tower.encoder.blocks.0.wqkv.weight", &[24, 8]);
        skip("mm_projector.pre_norm.weight", &[8]);
        synthetic
    }

    /// Rounds f32 tensors to bf16, as real files store them, but for the routers' biases.
    pub fn round_to_bf16(&mut self) {
        for tensor in &mut self.tensors {
            if tensor.dtype != DType::F32
                || tensor.name.ends_with("e_score_correction_bias")
                || tensor.name.ends_with("weight_scale_inv")
            {
                continue;
            }
            let round = |raw: [u8; 4]| bf16::from_f32(f32::from_le_bytes(raw)).to_le_bytes();
            let values = tensor.bytes.chunks_exact(4).map(|raw| [raw[0], raw[1], raw[2], raw[3]]);
            tensor.bytes = values.flat_map(round).collect();
            tensor.dtype = DType::BF16;
        }
    }

    /// The tensor of a name.
    pub fn tensor_mut(&mut self, name: &str) -> Option<&mut SyntheticTensor> {
        self.tensors.iter_mut().find(|tensor| tensor.name == name)
    }

    /// All tensors as one safetensors file.
    ///
    /// # Panics
    /// If a tensor's bytes do not fit its shape.
    pub fn to_safetensors(&self) -> Vec<u8> {
        serialize(self.tensors.iter())
    }

    /// Writes `config.json` and the weights into a directory: one file for one shard, else as many
    /// files and an index. Neighbours in [`Synthetic::tensors`] come into different shards, so that
    /// a packed weight and its scales do.
    ///
    /// # Errors
    /// [`ModelError::Write`].
    ///
    /// # Panics
    /// If there is to be no shard or a tensor's bytes do not fit its shape.
    pub fn write(&self, directory: &Path, shards: usize) -> Result<(), ModelError> {
        let write = |name: &str, contents: &[u8]| {
            let path = directory.join(name);
            fs::write(&path, contents).map_err(|source| ModelError::Write { path, source })
        };
        write("config.json", format!("{:#}\n", self.config).as_bytes())?;
        if shards == 1 {
            return write("model.safetensors", &self.to_safetensors());
        }
        let mut weight_map = Map::new();
        for shard in 0..shards {
            let file = format!("model-{}-of-{shards}.safetensors", shard + 1);
            let tensors = self.tensors.iter().skip(shard).step_by(shards);
            for tensor in tensors.clone() {
                weight_map.insert(tensor.name.clone(), file.clone().into());
            }
            write(&file, &serialize(tensors))?;
        }
        let total: usize = self.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write("model.safetensors.index.json", index.to_string().as_bytes())
    }
}

impl SyntheticTensor {
    /// A tensor of these bytes.
    pub fn new(
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: impl IntoIterator<Item = u8>,
    ) -> Self {
        let bytes = bytes.into_iter().collect();
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }

    /// f32 values hashed from a name, which may differ from the stored one.
    fn hashed(name: &str, hashed_name: &str, shape: &[usize]) -> Self {
        let count = shape.iter().product();
        let width = shape.last().copied().unwrap_or(1);
        let values = hash::floats(hashed_name, count, width).flat_map(f32::to_le_bytes);
        Self::new(name, DType::F32, shape, values)
    }
}

/// The tensors that store a module.
fn stored(module: &Module, storage: Storage, prefix: &str) -> Vec<SyntheticTensor> {
    let name = &module.name;
    let (shape, quantizable) = match module.kind {
        ModuleKind::Vector { length } => {
            return vec![SyntheticTensor::hashed(name, &format!("{prefix}{name}"), &[length])];
        }
        ModuleKind::Matrix { shape, quantizable } => (shape, quantizable && name != "lm_head"),
    };
    match storage {
        Storage::Fp8 if quantizable => fp8(name, shape),
        Storage::Int4Experts if quantizable && name.contains(".experts.") => int4(name, shape),
        _ => {
            let name = format!("{name}.weight");
            vec![SyntheticTensor::hashed(&name, &format!("{prefix}{name}"), &shape)]
        }
    }
}

fn fp8(module: &str, [rows, columns]: [usize; 2]) -> Vec<SyntheticTensor> {
    let (name, scale_name) = (format!("{module}.weight"), format!("{module}.weight_scale_inv"));
    let blocks = [rows.div_ceil(128), columns.div_ceil(128)];
    let codes = hash::fp8_codes(&name, rows * columns);
    let scales = hash::block_scales(&scale_name, blocks[0] * blocks[1], columns);
    vec![
        SyntheticTensor::new(&name, DType::F8E4M3, &[rows, columns], codes),
        SyntheticTensor::new(&scale_name, DType::F32, &blocks, scales.flat_map(f32::to_le_bytes)),
    ]
}

fn int4(module: &str, [rows, columns]: [usize; 2]) -> Vec<SyntheticTensor> {
    let name = |part: &str| format!("{module}.{part}");
    let (packed_name, scale_name) = (name("weight_packed"), name("weight_scale"));
    let packed = [rows, columns / 8];
    let words = hash::packed_words(&packed_name, packed[0] * packed[1]);
    let groups = [rows, columns / INT4_GROUP];
    let scales = hash::group_scales(&scale_name, groups[0] * groups[1], columns);
    let shape = [rows as i32, columns as i32].into_iter().flat_map(i32::to_le_bytes);
    vec![
        SyntheticTensor::new(&packed_name, DType::I32, &packed, words.flat_map(i32::to_le_bytes)),
        SyntheticTensor::new(&scale_name, DType::BF16, &groups, scales.flat_map(bf16::to_le_bytes)),
        SyntheticTensor::new(&name("weight_shape"), DType::I32, &[2], shape),
    ]
}

fn serialize<'a>(tensors: impl Iterator<Item = &'a SyntheticTensor>) -> Vec<u8> {
    let named = tensors.map(|tensor| (tensor.name.as_str(), tensor));
    safetensors::serialize(named, None).expect("a tensor's bytes fit its shape")
}

impl View for &SyntheticTensor {
    fn dtype(&self) -> Dtype {
        match self.dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::F8E4M3 => Dtype::F8_E4M3,
            DType::I64 => Dtype::I64,
            DType::I32 => Dtype::I32,
            DType::U8 => Dtype::U8,
            DType::I8 => Dtype::I8,
            DType::Bool => Dtype::BOOL,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
