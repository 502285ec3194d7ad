//! From the modules that a configuration calls for to the tensors that are there.
//!
//! Each matrix is found in one of the forms of checkpoints: floats, FP8 codes with block
//! multipliers, or packed INT4 codes with scales and their logical shape. Invariant: after
//! [`Resolution::finish`], either every module was found with its shape and every tensor was used,
//! or each exception is a problem that names its tensor. Start reading at
//! [`Resolution::of_modules`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use paceline_kernels::{DType, INT4_GROUP, Tensor, Weight};

use super::layout::{Module, ModuleKind};
use super::{Checkpoint, rename};
use crate::ModelError;
use crate::shard::Split;

/// FP8 blocks of every known checkpoint (DeepSeek-V3, section 3.3).
const FP8_BLOCK: [usize; 2] = [128, 128];

/// What was found of a list of modules.
pub(super) struct Resolution<'a> {
    checkpoint: &'a Checkpoint,
    matrices: HashMap<String, (Weight, Split)>,
    vectors: HashMap<String, Tensor>,
    used: HashSet<String>,
    problems: Vec<Problem>,
}

/// Something that keeps a checkpoint from being loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// A tensor that should be there, by normalised name, and what it should be.
    Missing { tensor: String, expected: String },
    /// A tensor that nothing uses, by normalised name.
    Unknown { tensor: String },
    /// A tensor that is there and wrong, as a text that names it.
    Wrong(String),
}

impl<'a> Resolution<'a> {
    /// Looks for every module.
    pub(super) fn of_modules(checkpoint: &'a Checkpoint, modules: &[Module]) -> Self {
        let mut resolution = Self {
            checkpoint,
            matrices: HashMap::with_capacity(modules.len()),
            vectors: HashMap::new(),
            used: HashSet::with_capacity(checkpoint.len()),
            problems: Vec::new(),
        };
        for module in modules {
            let name = &module.name;
            match module.kind {
                ModuleKind::Vector { length } => {
                    if let Some(tensor) = resolution.floats(name, &[length]) {
                        resolution.vectors.insert(name.clone(), tensor);
                    }
                }
                ModuleKind::Matrix { shape, quantizable } => {
                    if let Some(weight) = resolution.any_matrix(name, shape, quantizable) {
                        resolution.matrices.insert(name.clone(), (weight, module.split));
                    }
                }
            }
        }
        resolution
    }

    /// A matrix that was found, whole, and how ranks share it.
    pub(super) fn matrix(&self, name: &str) -> Option<(&Weight, Split)> {
        self.matrices.get(name).map(|(weight, split)| (weight, *split))
    }

    /// A vector that was found.
    pub(super) fn vector(&self, name: &str) -> Option<&Tensor> {
        self.vectors.get(name)
    }

    /// A tensor that need not be there, of one of some types; a wrong one is a problem.
    pub(super) fn optional(
        &mut self,
        name: &str,
        dtypes: &[DType],
        shape: &[usize],
    ) -> Option<Tensor> {
        self.checkpoint.tensor(name)?;
        self.tensor(name, dtypes, shape)
    }

    /// A tensor of one of some types and of this shape; its absence is a problem too.
    pub(super) fn tensor(
        &mut self,
        name: &str,
        dtypes: &[DType],
        shape: &[usize],
    ) -> Option<Tensor> {
        let Some(tensor) = self.checkpoint.tensor(name) else {
            let expected = format!("{} {shape:?}", join(dtypes));
            self.problems.push(Problem::Missing { tensor: name.to_owned(), expected });
            return None;
        };
        self.used.insert(name.to_owned());
        if !dtypes.contains(&tensor.dtype()) {
            let found = tensor.dtype();
            self.wrong(name, &format!("has element type {found}, expected {}", join(dtypes)));
            return None;
        }
        if tensor.shape() != shape {
            self.wrong(name, &format!("has shape {:?}, expected {shape:?}", tensor.shape()));
            return None;
        }
        Some(tensor.clone())
    }

    /// Marks a tensor as known although nothing reads it.
    pub(super) fn ignore(&mut self, name: &str) {
        self.used.insert(name.to_owned());
    }

    /// Adds a problem with what was found.
    pub(super) fn wrong(&mut self, name: &str, reason: &str) {
        let stored = self.checkpoint.stored_name(name);
        self.problems.push(Problem::Wrong(format!("{stored} {reason}")));
    }

    /// All problems as texts, after those tensors were named that nothing uses and that `is_known`
    /// does not know.
    pub(super) fn problems(&self, is_known: impl Fn(&str) -> bool) -> Vec<String> {
        let unused = self.checkpoint.names().filter(|name| !self.used.contains(*name));
        let unknown = unused.filter(|name| !is_known(name));
        let mut unknown =
            unknown.map(|name| Problem::Unknown { tensor: name.to_owned() }).peekable();
        // A stranger may be part of a layer that was renamed.
        let found = match unknown.peek() {
            None => self.with_whole_layers(),
            Some(_) => self.problems.clone(),
        };
        let problems: Vec<Problem> = found.into_iter().chain(unknown).collect();
        rename::describe(&problems, |name| self.checkpoint.stored_name(name))
    }

    /// The problems, with one in place of all tensors of the layers that are missing whole.
    fn with_whole_layers(&self) -> Vec<Problem> {
        let stored: HashSet<usize> = self.checkpoint.names().filter_map(layer_of).collect();
        let whole = |problem: &Problem| match problem {
            Problem::Missing { tensor, .. } => {
                layer_of(tensor).filter(|layer| !stored.contains(layer))
            }
            _ => None,
        };
        let layers: BTreeSet<usize> = self.problems.iter().filter_map(whole).collect();
        let Some(last) = layers.last() else { return self.problems.clone() };
        let (missing, mut rest): (Vec<_>, Vec<_>) =
            self.problems.iter().cloned().partition(|problem| whole(problem).is_some());
        let used = self.used.iter().filter_map(|name| layer_of(name));
        let used: BTreeSet<usize> = used.collect();
        let called_for = 1 + used.last().map_or(*last, |used| *used.max(last));
        let names: Vec<String> = layers.iter().map(ToString::to_string).collect();
        let subject = match names.as_slice() {
            [layer] => format!("layer {layer} is"),
            layers => format!("layers {} are", layers.join(", ")),
        };
        let text = format!(
            "{subject} missing whole ({} tensors): config.json says {called_for} layers, the \
             weights have {}",
            missing.len(),
            called_for - layers.len(),
        );
        rest.insert(0, Problem::Wrong(text));
        rest
    }

    /// Succeeds if there is no problem.
    ///
    /// # Errors
    /// [`ModelError::CheckpointMismatch`] with the first problems.
    pub(super) fn finish(&self, is_known: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        const SHOWN_MAX: usize = 20;
        let mut problems = self.problems(is_known);
        let count = problems.len();
        if count == 0 {
            return Ok(());
        }
        if count > SHOWN_MAX {
            problems.truncate(SHOWN_MAX);
            problems.push(format!("and {} more", count - SHOWN_MAX));
        }
        let name = self.checkpoint.name().to_owned();
        Err(ModelError::CheckpointMismatch { name, problems, count })
    }

    fn any_matrix(&mut self, name: &str, shape: [usize; 2], quantizable: bool) -> Option<Weight> {
        let has = |suffix: &str| self.checkpoint.tensor(&format!("{name}.{suffix}")).is_some();
        if !quantizable {
            return self.float_matrix(name, shape);
        }
        // A lone companion already tells the form, so that what is missing is named right.
        let plain = self.checkpoint.tensor(&format!("{name}.weight"));
        let is_fp8 = plain.is_some_and(|tensor| tensor.dtype() == DType::F8E4M3);
        let packed = ["weight_packed", "weight_scale", "weight_shape"].into_iter().any(has);
        if plain.is_none() && packed {
            self.int4_matrix(name, shape)
        } else if is_fp8 || (plain.is_none() && has("weight_scale_inv")) {
            self.fp8_matrix(name, shape)
        } else {
            self.float_matrix(name, shape)
        }
    }

    fn float_matrix(&mut self, name: &str, shape: [usize; 2]) -> Option<Weight> {
        let tensor = self.floats(&format!("{name}.weight"), &shape)?;
        self.made(name, Weight::float(tensor))
    }

    fn fp8_matrix(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Option<Weight> {
        let codes = self.tensor(&format!("{name}.weight"), &[DType::F8E4M3], &[rows, columns]);
        let blocks = [rows.div_ceil(FP8_BLOCK[0]), columns.div_ceil(FP8_BLOCK[1])];
        let scale = self.tensor(&format!("{name}.weight_scale_inv"), &[DType::F32], &blocks);
        self.made(name, Weight::fp8(codes?, scale?, FP8_BLOCK))
    }

    fn int4_matrix(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Option<Weight> {
        let [packed_name, scale_name, shape_name] =
            ["weight_packed", "weight_scale", "weight_shape"].map(|part| format!("{name}.{part}"));
        if !columns.is_multiple_of(INT4_GROUP) {
            for part in [&packed_name, &scale_name, &shape_name] {
                self.ignore(part);
            }
            let reason =
                format!("packs rows of {columns} values, no multiple of the group {INT4_GROUP}");
            self.wrong(&packed_name, &reason);
            return None;
        }
        let packed = self.tensor(&packed_name, &[DType::I32], &[rows, columns / 8]);
        let scale = self.tensor(&scale_name, FLOATS, &[rows, columns / INT4_GROUP]);
        if let Some(shape) = self.tensor(&shape_name, &[DType::I32, DType::I64], &[2]) {
            let shape = integers(&shape);
            if shape != [rows as i64, columns as i64] {
                let reason = format!("says {shape:?}, expected {:?}", [rows, columns]);
                self.wrong(&shape_name, &reason);
            }
        }
        self.made(name, Weight::int4(packed?, scale?))
    }

    fn floats(&mut self, name: &str, shape: &[usize]) -> Option<Tensor> {
        self.tensor(name, FLOATS, shape)
    }

    fn made(&mut self, name: &str, weight: paceline_kernels::Result<Weight>) -> Option<Weight> {
        weight.map_err(|error| self.wrong(name, &format!("cannot be used: {error}"))).ok()
    }
}

/// The values of a tensor of 32- or 64-bit integers, which may be misaligned in its file.
pub(super) fn integers(tensor: &Tensor) -> Vec<i64> {
    let rows = (0..tensor.rows()).map(|row| tensor.row_bytes(row));
    match tensor.dtype() {
        DType::I32 => {
            let value = |raw: &[u8]| i64::from(bytemuck::pod_read_unaligned::<i32>(raw));
            rows.flat_map(|row| row.chunks_exact(4).map(value)).collect()
        }
        DType::I64 => {
            rows.flat_map(|row| row.chunks_exact(8).map(bytemuck::pod_read_unaligned)).collect()
        }
        other => panic!("{other} is no integer type of a checkpoint"),
    }
}

const FLOATS: &[DType] = &[DType::BF16, DType::F16, DType::F32];

fn join(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ")
}

/// Whether a tensor belongs to a multi-token-prediction layer (DeepSeek-V3, section 2.2), which is
/// stored after the decoder layers and not used.
pub(super) fn is_prediction_layer(
    checkpoint: &Checkpoint,
    layers: usize,
    declared: usize,
) -> impl Fn(&str) -> bool {
    // Some configurations do not declare such layers; then their projection gives them away.
    let mark = |layer: usize| format!("model.layers.{layer}.eh_proj.weight");
    let marked: BTreeMap<usize, bool> = checkpoint
        .names()
        .filter_map(layer_of)
        .filter(|&layer| layer >= layers)
        .map(|layer| (layer, checkpoint.tensor(&mark(layer)).is_some()))
        .collect();
    move |name| {
        layer_of(name).is_some_and(|layer| {
            let declared = layer >= layers && layer - layers < declared;
            declared || marked.get(&layer).copied().unwrap_or(false)
        })
    }
}

fn layer_of(name: &str) -> Option<usize> {
    let (layer, _) = name.strip_prefix("model.layers.")?.split_once('.')?;
    layer.parse().ok()
}
