//! What a checkpoint is, what each rank would hold, and what would not load.
//!
//! Invariant: making a report reads headers only and never fails; whatever keeps the checkpoint
//! from being loaded is in [`Report::problems`], and an empty list means that loading succeeds.
//! Start reading at [`Report::of_source`].

use std::collections::BTreeMap;

use paceline_kernels::Weight;

use super::layout::{Module, ModuleKind, model_modules};
use super::loading::{check_size, cut, resolve_model};
use super::resolution::{Resolution, is_prediction_layer};
use super::{Checkpoint, Skipped, Source};
use crate::config::ModelConfig;
use crate::shard::Parallel;

/// What is known of a target's checkpoint without reading its weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Weight files.
    pub files: usize,
    /// Tensors that inference may use.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub bytes: u64,
    /// Tensors that inference never uses: vision parts, stored rotary tables, layers for
    /// multi-token prediction.
    pub skipped: Skipped,
    /// The forms in which weights are stored, by name (`bf16`, `int4`, …).
    pub storages: BTreeMap<&'static str, Stored>,
    /// Memory of each rank's weights; empty if the model cannot be split that way.
    pub ranks: Vec<RankBytes>,
    /// Why the checkpoint cannot be loaded, one line each; empty if it can.
    pub problems: Vec<String>,
}

/// Modules that are stored in one form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Number of modules.
    pub modules: usize,
    /// Their bytes, scales included.
    pub bytes: u64,
}

/// Memory of one rank's weights, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankBytes {
    /// Views of the mapped files: shared by the ranks of a machine, and dropped and read again by
    /// the system as it likes.
    pub mapped: u64,
    /// Copies of the rank's own: split `kv_b_proj`, routers, norms.
    pub copied: u64,
}

impl RankBytes {
    /// Both together.
    pub fn total(&self) -> u64 {
        self.mapped + self.copied
    }
}

impl Report {
    /// The report of a model's files, split over `tensor` ranks. A configuration or file that
    /// cannot be read is a problem like others.
    pub fn of_source(source: &Source, tensor: usize, expert_parallel: bool) -> Self {
        let (config, checkpoint) = match (source.model_config(), source.checkpoint()) {
            (Ok(config), Ok(checkpoint)) => (config, checkpoint),
            (config, checkpoint) => {
                let errors = config.err().into_iter().chain(checkpoint.err());
                let problems = errors.map(|error| error.to_string()).collect();
                return Self { problems, ..Self::default() };
            }
        };
        Self::of_checkpoint(&checkpoint, &config, tensor, expert_parallel)
    }

    /// The report of an open checkpoint, split over `tensor` ranks.
    pub fn of_checkpoint(
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        tensor: usize,
        expert_parallel: bool,
    ) -> Self {
        if let Err(error) = check_size(checkpoint, config) {
            return Self { problems: vec![error.to_string()], ..Self::default() };
        }
        let modules = model_modules(config);
        let resolution = resolve_model(checkpoint, config, &modules);
        let is_skipped = is_prediction_layer(checkpoint, config.layers, config.mtp_layers);
        let mut report = Self {
            files: checkpoint.files(),
            tensors: checkpoint.len(),
            bytes: checkpoint.bytes(),
            skipped: checkpoint.skipped(),
            problems: resolution.problems(&is_skipped),
            ..Self::default()
        };
        for name in checkpoint.names().filter(|name| is_skipped(name)) {
            let bytes = checkpoint.tensor(name).map_or(0, |tensor| tensor.bytes() as u64);
            report.tensors -= 1;
            report.bytes -= bytes;
            report.skipped.tensors += 1;
            report.skipped.bytes += bytes;
        }
        report.add_storages(&resolution, &modules);
        let parallel = Parallel { tensor, rank: 0, expert_parallel };
        match parallel.check(config) {
            Ok(()) => report.add_ranks(&resolution, &modules, config, &parallel),
            Err(error) => report.problems.push(error.to_string()),
        }
        report
    }

    fn add_storages(&mut self, resolution: &Resolution<'_>, modules: &[Module]) {
        for Module { name, .. } in modules {
            let (form, bytes) = if let Some((weight, _)) = resolution.matrix(name) {
                (form(weight), weight.bytes())
            } else if let Some(vector) = resolution.vector(name) {
                (vector.dtype().name(), vector.bytes())
            } else {
                continue;
            };
            let stored = self.storages.entry(form).or_default();
            stored.modules += 1;
            stored.bytes += bytes as u64;
        }
    }

    fn add_ranks(
        &mut self,
        resolution: &Resolution<'_>,
        modules: &[Module],
        config: &ModelConfig,
        parallel: &Parallel,
    ) {
        for rank in 0..parallel.tensor {
            let parallel = Parallel { rank, ..*parallel };
            let mut bytes = RankBytes::default();
            for module in modules {
                if let Err(problem) = add_module(&mut bytes, resolution, module, config, &parallel)
                {
                    self.problems.push(problem);
                    // What cannot be cut on one rank cannot on the others.
                    self.ranks.clear();
                    return;
                }
            }
            self.ranks.push(bytes);
        }
    }
}

/// Adds what a rank holds of a module, as [`super::ModelWeights::load`] holds it.
fn add_module(
    bytes: &mut RankBytes,
    resolution: &Resolution<'_>,
    module: &Module,
    config: &ModelConfig,
    parallel: &Parallel,
) -> Result<(), String> {
    if let ModuleKind::Vector { length } = module.kind {
        bytes.copied += (length * F32_BYTES) as u64;
        return Ok(());
    }
    let Some((weight, split)) = resolution.matrix(&module.name) else { return Ok(()) };
    let part = cut(weight, split, parallel).map_err(|error| format!("{}: {error}", module.name))?;
    let Some(part) = part else { return Ok(()) };
    let elements = part.out_features() * part.in_features();
    if module.name.ends_with(".kv_b_proj") {
        // The keys' rows are kept twice, once transposed.
        let (dn, dv) = (config.qk_nope_head_dim, config.v_head_dim);
        let element = match weight {
            Weight::Float(values) => values.dtype().bytes(),
            _ => F32_BYTES,
        };
        bytes.copied += (elements / (dn + dv) * (2 * dn + dv) * element) as u64;
    } else if module.name.ends_with(".mlp.gate") {
        bytes.copied += (elements * F32_BYTES) as u64;
    } else {
        bytes.mapped += part.bytes() as u64;
    }
    Ok(())
}

const F32_BYTES: usize = 4;

fn form(weight: &Weight) -> &'static str {
    match weight {
        Weight::Float(values) => values.dtype().name(),
        Weight::Int4(_) => "int4",
        Weight::Fp8(_) => "fp8",
    }
}
