//! What is measured: arguments as cases. Pure.

use std::time::Duration;

use anyhow::{Result, ensure};
use paceline_kernels::DType;

use crate::args::{
    CallsArguments, DTypeArgument, DeviceArgument, FormArgument, ModeArgument, PlaceArguments,
};

/// Whether a call needs the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Each call has its own input.
    Independent,
    /// Each input is made from the output before.
    Dependent,
}

impl Form {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Independent => "independent",
            Self::Dependent => "dependent",
        }
    }
}

/// Calls of one size in one form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) form: Form,
    /// Of the tensors.
    pub(super) shape: [usize; 2],
    pub(super) dtype: DType,
    /// In a row.
    pub(super) calls: usize,
}

impl Case {
    /// Elements of a tensor.
    pub(super) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of a tensor.
    pub(super) fn bytes(&self) -> usize {
        self.count() * self.dtype.bytes()
    }
}

/// All cases, and how often each is measured.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) world: usize,
    pub(super) mode: ModeArgument,
    /// With residual addition and RMSNorm.
    pub(super) fused: bool,
    pub(super) host_staged: bool,
    pub(super) cases: Vec<Case>,
    pub(super) warm_up: usize,
    pub(super) repetitions: usize,
    pub(super) timeout: Duration,
}

/// Bytes that the tensors of a case may take on a rank: calls that have an input each become fewer
/// rather than take more. A case has at least one call.
const HOST_BYTES_MAX: usize = 64 << 20;
const DEVICE_BYTES_MAX: usize = 512 << 20;

impl Plan {
    pub(super) fn new(place: &PlaceArguments, calls: &CallsArguments) -> Result<Self> {
        let (bytes_max, default) = match place.device {
            DeviceArgument::Cpu => (HOST_BYTES_MAX, ModeArgument::Eager),
            DeviceArgument::Cuda => (DEVICE_BYTES_MAX, ModeArgument::Graph),
        };
        let mode = calls.mode.unwrap_or(default);
        ensure!(
            (place.device, mode) != (DeviceArgument::Cpu, ModeArgument::Graph),
            "--mode graph: graphs exist on GPUs only; use --mode eager, or --device cuda"
        );
        ensure!(
            place.device == DeviceArgument::Cuda || !(place.host_staged || calls.fused),
            "--host-staged and --fused are for GPUs: add --device cuda"
        );
        ensure!(
            !calls.fused || calls.form == FormArgument::Independent,
            "--fused is measured in the independent form: add --form independent"
        );
        let dtype = match calls.dtype {
            DTypeArgument::F32 => DType::F32,
            DTypeArgument::Bf16 => DType::BF16,
            DTypeArgument::F16 => DType::F16,
        };
        let forms: &[Form] = match calls.form {
            FormArgument::Independent => &[Form::Independent],
            FormArgument::Dependent => &[Form::Dependent],
            FormArgument::Both => &[Form::Independent, Form::Dependent],
        };
        let mut cases = Vec::new();
        for &form in forms {
            for shape in shapes(calls, dtype)? {
                let mut case = Case { form, shape, dtype, calls: calls.calls };
                if form == Form::Independent {
                    case.calls = case.calls.min(bytes_max / case.bytes()).max(1);
                }
                cases.push(case);
            }
        }
        Ok(Self {
            world: place.world.into(),
            mode,
            fused: calls.fused,
            host_staged: place.host_staged,
            cases,
            warm_up: calls.warm_up.into(),
            repetitions: calls.repetitions.into(),
            timeout: Duration::from_secs(place.timeout.into()),
        })
    }
}

/// Of each size, in the order asked for.
fn shapes(calls: &CallsArguments, dtype: DType) -> Result<Vec<[usize; 2]>> {
    if !calls.rows.is_empty() {
        return Ok(calls.rows.iter().map(|&rows| [rows, calls.hidden]).collect());
    }
    let sizes = calls.sizes.iter().flat_map(|sizes| &sizes.0);
    let shape = |&bytes: &usize| {
        ensure!(
            bytes % dtype.bytes() == 0,
            "--sizes: {bytes} bytes are no whole number of {dtype} elements, which have {}",
            dtype.bytes()
        );
        Ok([1, bytes / dtype.bytes()])
    };
    sizes.map(shape).collect()
}
