//! One safetensors file as tensors that view its bytes.
//!
//! Invariant: when [`read`] succeeds, the tensors tile the file's data exactly, so a file that was
//! cut short or grew is refused before anything reads it.

use paceline_kernels::{DType, SharedBytes, Tensor};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

/// Length field in front of the header.
const LENGTH_BYTES: usize = 8;
/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const DIMENSIONS_MAX: usize = 4;

/// A tensor as a view, or what is wrong with it. Some that are no concern of ours (vision) have
/// types or shapes that nothing here supports, so only a user of the tensor may complain.
pub(super) type Stored = Result<Tensor, String>;

/// The tensors of a file, by stored name, in no particular order.
///
/// # Errors
/// What is wrong with the file, without its name and without advice.
pub(super) fn read(bytes: &SharedBytes) -> Result<Vec<(String, Stored)>, String> {
    let file: &[u8] = (**bytes).as_ref();
    let (metadata, data_start) = read_header(file)?;
    let expected = data_start + metadata.data_len();
    if file.len() != expected {
        let difference = match file.len() < expected {
            true => "it was cut short",
            false => "there are bytes after the last tensor",
        };
        let found = file.len();
        return Err(format!(
            "it has {found} bytes where its header describes {expected}: {difference}"
        ));
    }
    let view = |info: &TensorInfo| {
        let dtype = element_type(info.dtype)
            .ok_or_else(|| format!("element type {} is not supported", info.dtype))?;
        let offset = data_start + info.data_offsets.0;
        if !(1..=DIMENSIONS_MAX).contains(&info.shape.len()) {
            return Err(format!("{} dimensions are not supported", info.shape.len()));
        }
        Tensor::from_shared(dtype, &info.shape, bytes.clone(), offset)
            .map_err(|error| error.to_string())
    };
    Ok(metadata.tensors().into_iter().map(|(name, info)| (name, view(info))).collect())
}

/// The checked header and where the data starts.
fn read_header(file: &[u8]) -> Result<(Metadata, usize), String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("it has {} bytes, too few for a safetensors file", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(format!(
            "its header would have {length} bytes, more than the {HEADER_BYTES_MAX} that the \
             format allows: it is not a safetensors file, or it is corrupt"
        ));
    }
    let length = length as usize;
    let Some(header) = rest.get(..length) else {
        let found = file.len();
        return Err(format!("it has {found} bytes, less than its header of {length} bytes"));
    };
    let metadata = serde_json::from_slice(header)
        .map_err(|error| format!("its header cannot be read ({error})"))?;
    Ok((metadata, LENGTH_BYTES + length))
}

fn element_type(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}
