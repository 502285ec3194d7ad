//! Quantisation that a checkpoint declares for its weights.
//!
//! Invariant: what is not read as one of [`Quantization`]'s forms is an error, never a guess. Which
//! modules are quantised is decided by the tensors themselves, not by the lists in the file.

use serde_json::{Value, json};

use super::section::Section;
use crate::ModelError;

/// How the linear weights of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Plain floats.
    None,
    /// compressed-tensors "pack-quantized": symmetric INT4 codes, eight to a 32-bit word.
    Int4PackQuantized {
        /// Input channels that share a scale.
        group_size: usize,
    },
    /// FP8 E4M3 with one multiplier per block (DeepSeek-V3, section 3.3).
    Fp8Block {
        /// Output and input channels of a block.
        block: [usize; 2],
    },
}

impl Quantization {
    /// Reads `quantization_config` of a configuration; `None` if it has none.
    pub(super) fn read(config: &Section<'_>) -> Result<Option<Self>, ModelError> {
        let Some(section) = config.section("quantization_config")? else { return Ok(None) };
        match section.text("quant_method")? {
            Some("compressed-tensors") => read_int4(&section).map(Some),
            Some("fp8") => read_fp8(&section).map(Some),
            _ => Err(section.invalid("quant_method", "\"compressed-tensors\" or \"fp8\"")),
        }
    }
}

fn read_int4(section: &Section<'_>) -> Result<Quantization, ModelError> {
    if section.text("format")? != Some("pack-quantized") {
        return Err(section.invalid("format", "\"pack-quantized\""));
    }
    section.only("kv_cache_scheme", &Value::Null)?;
    let groups = section.section("config_groups")?;
    let groups = groups.ok_or_else(|| section.missing("config_groups", "an object"))?;
    let mut found = None;
    for name in groups.unread(&[]) {
        let name = name.rsplit('.').next().unwrap_or_default();
        let Some(group) = groups.section(name)? else { continue };
        group.only("input_activations", &Value::Null)?;
        group.only("output_activations", &Value::Null)?;
        let weights = group.section("weights")?;
        let weights = weights.ok_or_else(|| group.missing("weights", "an object"))?;
        let group_size = read_int4_weights(&weights)?;
        if found.is_some_and(|other| other != group_size) {
            let expected = "one group size for all groups";
            return Err(weights.invalid("group_size", expected));
        }
        found = Some(group_size);
    }
    match found {
        Some(group_size) => Ok(Quantization::Int4PackQuantized { group_size }),
        None => Err(section.invalid("config_groups", "at least one group with weights")),
    }
}

fn read_int4_weights(weights: &Section<'_>) -> Result<usize, ModelError> {
    if weights.integer("num_bits", 1..=64)? != Some(4) {
        return Err(weights.invalid("num_bits", "4"));
    }
    weights.only("type", &json!("int"))?;
    weights.only("strategy", &json!("group"))?;
    weights.only("symmetric", &json!(true))?;
    weights.only("dynamic", &json!(false))?;
    weights.only("actorder", &Value::Null)?;
    match weights.integer("group_size", 1..=1024)? {
        Some(size @ 32) => Ok(size),
        _ => Err(weights.invalid("group_size", "32")),
    }
}

fn read_fp8(section: &Section<'_>) -> Result<Quantization, ModelError> {
    section.only("fmt", &json!("e4m3"))?;
    section.only("activation_scheme", &json!("dynamic"))?;
    // The scale format only concerns activations, which stay in bf16 here.
    section.only("scale_fmt", &json!("ue8m0"))?;
    match section.integers("weight_block_size", 1..=1 << 16)?[..] {
        [128, 128] => Ok(Quantization::Fp8Block { block: [128, 128] }),
        _ => Err(section.invalid("weight_block_size", "[128, 128]")),
    }
}
