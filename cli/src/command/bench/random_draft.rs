//! A draft of random weights in the shape of a real one: it costs what the real one does, and its
//! tokens are hardly ever accepted.

use anyhow::{Context, Result, bail};
use paceline_kernels::{DType, Tensor};
use paceline_model::{
    synthetic::{Synthetic, SyntheticTensor},
    weights::Source,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tempfile::TempDir;

/// Start of the random numbers, so that every run measures the same draft.
const SEED: u64 = 1;

/// A draft like `source`, with random weights, in a folder that lasts as long as what is returned.
/// Once loaded, it no longer needs the folder.
///
/// Vocabulary maps and other whole numbers stay, norms are ones, and the other values are uniform
/// with the gain of one for a matrix's inputs.
pub(super) fn write(source: &Source) -> Result<(TempDir, Source)> {
    let checkpoint = source.checkpoint()?;
    let config = serde_json::from_str(&source.config()?).context("the draft's configuration")?;
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mut tensors = Vec::new();
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name).context("a tensor's name leads to no tensor")?;
        let bytes = values(tensor, &mut random)
            .with_context(|| format!("--random-draft: the draft's tensor {name}"))?;
        let name = checkpoint.stored_name(name);
        tensors.push(SyntheticTensor::new(&name, tensor.dtype(), tensor.shape(), bytes));
    }
    let folder = tempfile::tempdir().context("--random-draft: cannot make a temporary folder")?;
    Synthetic { config, tensors }.write(folder.path(), 1)?;
    let source = Source::Directory(folder.path().to_owned());
    Ok((folder, source))
}

fn values(tensor: &Tensor, random: &mut ChaCha8Rng) -> Result<Vec<u8>> {
    let count = tensor.len();
    let is_vector = tensor.shape().len() < 2;
    let gain = (3.0 / tensor.width() as f32).sqrt();
    let mut value = || if is_vector { 1.0 } else { gain * random.random_range(-1.0f32..1.0) };
    let floats = std::iter::repeat_with(&mut value).take(count);
    Ok(match tensor.dtype() {
        DType::F32 => floats.flat_map(f32::to_le_bytes).collect(),
        DType::BF16 => floats.map(half::bf16::from_f32).flat_map(half::bf16::to_le_bytes).collect(),
        DType::F16 => floats.map(half::f16::from_f32).flat_map(half::f16::to_le_bytes).collect(),
        DType::I64 | DType::I32 | DType::U8 | DType::Bool => {
            (0..tensor.rows()).flat_map(|row| tensor.row_bytes(row)).copied().collect()
        }
        other => bail!("is stored as {other}, of which there are no random values; leave it out"),
    })
}
