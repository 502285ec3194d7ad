//! Arguments of `paceline bench all-reduce`.

use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::{DTypeArgument, bench::ReportArguments};

/// What `paceline bench all-reduce --help` says after the short description.
pub(super) const LONG_ABOUT: &str = "\
Measure all-reduces: the time of a call by size, for each back end.

The ranks are threads of this process. A repetition times --calls calls in a row, on every rank; \
its time is that of the slowest rank, divided by the calls. In the independent form no call \
needs another: on the CPU each has an input of its own, on GPUs they take turns with inputs that \
fit in the cache; in the dependent form each input is made from the output before, as in a \
model, and the time of making it, measured alone, is subtracted. The columns are those of \
nccl-tests: busbw is algbw * 2 (n - 1) / n. After the timed calls every output on every rank is \
compared with the exact sum; #wrong counts the elements that differ. --json has every sample.";

/// As in nccl-tests' own runs, but in steps of four.
const SIZES_DEFAULT: &str = "1K..64M:4";

#[derive(Debug, Args)]
pub(crate) struct AllReduceArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    #[command(flatten)]
    pub(crate) calls: CallsArguments,
    #[command(flatten)]
    pub(crate) report: ReportArguments,
}

/// Who exchanges, and by which means.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub(crate) struct PlaceArguments {
    /// Back ends to compare, auto (the policy's choice for each size) among them; all means those
    /// of this build that take tensors on the device.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', num_args = 1, default_value = "all")]
    pub(crate) backends: Vec<String>,
    /// Where the tensors lie.
    #[arg(long, value_enum, default_value_t = DeviceArgument::Cpu)]
    pub(crate) device: DeviceArgument,
    /// Number of ranks.
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) world: u16,
    /// Put several ranks on a GPU where there are more ranks than GPUs.
    #[arg(long)]
    pub(crate) virtual_ranks: bool,
    /// Let GPUs meet in pinned host memory, as those do that cannot reach each other's.
    #[arg(long)]
    pub(crate) host_staged: bool,
    /// Seconds after which a rank that does not come, or a device that does not finish, is given
    /// up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) timeout: u32,
}

/// What to measure.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measurement")]
pub(crate) struct CallsArguments {
    /// Add a residual and normalise in the same kernel (RMSNorm): for --rows on GPUs, in the
    /// independent form. What is checked is the residual, which then holds the sum.
    #[arg(long, requires = "rows")]
    pub(crate) fused: bool,
    /// Bytes of a call: sizes such as 14K and ranges such as 1K..64M:4, which grow by a factor (2
    /// unless told).
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', num_args = 1,
          default_value = SIZES_DEFAULT)]
    pub(crate) sizes: Vec<SizesArgument>,
    /// Sizes as rows of --hidden elements instead.
    #[arg(long, value_name = "N,…", value_delimiter = ',', num_args = 1,
          conflicts_with = "sizes",
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_048_576))]
    pub(crate) rows: Vec<usize>,
    /// Elements of a row.
    #[arg(long, value_name = "N", default_value_t = 7168,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_048_576))]
    pub(crate) hidden: usize,
    /// Type of the elements.
    #[arg(long, value_enum, default_value_t = DTypeArgument::Bf16)]
    pub(crate) dtype: DTypeArgument,
    /// Calls in a row (fewer where their buffers would take too much memory; the table says how
    /// many).
    #[arg(long, value_name = "N", default_value_t = 122,
          value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=4096))]
    pub(crate) calls: usize,
    /// How calls are started [default: graph on GPUs, eager on the CPU].
    #[arg(long, value_enum)]
    pub(crate) mode: Option<ModeArgument>,
    /// Whether a call needs the one before.
    #[arg(long, value_enum, default_value_t = FormArgument::Both)]
    pub(crate) form: FormArgument,
    /// Timed repetitions of each size.
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) repetitions: u16,
    /// Repetitions before them that do not count.
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u16).range(0..=10_000))]
    pub(crate) warm_up: u16,
}

/// Where tensors lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArgument {
    /// In the memory of the machine; ranks are its threads.
    Cpu,
    /// On GPUs, rank r on GPU r.
    Cuda,
}

/// How calls are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArgument {
    /// All calls as one CUDA graph.
    Graph,
    /// One after the other.
    Eager,
}

/// Whether a call needs the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormArgument {
    /// Each call has its own input.
    Independent,
    /// Each input is made from the output before.
    Dependent,
    /// One after the other.
    Both,
}

/// One or more sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizesArgument(pub(crate) Vec<usize>);

/// More than any machine has room for.
const SIZE_MAX: usize = 64 << 30;

impl FromStr for SizesArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((low, rest)) = text.split_once("..") else {
            return size(text).map(|size| Self(vec![size]));
        };
        let (high, factor) = rest.split_once(':').unwrap_or((rest, "2"));
        let (low, high) = (size(low)?, size(high)?);
        let factor = match factor.parse::<usize>() {
            Ok(factor) if factor >= 2 => factor,
            _ => return Err(format!("{factor} is no factor; write a whole number from 2 on")),
        };
        if low > high {
            return Err(format!("{text} ends before it begins"));
        }
        let next = |size: &usize| size.checked_mul(factor);
        let sizes = std::iter::successors(Some(low), next).take_while(|&size| size <= high);
        Ok(Self(sizes.collect()))
    }
}

/// Bytes; K, M and G are powers of 1024.
fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((end, 'K' | 'k')) => (&text[..end], 1 << 10),
        Some((end, 'M' | 'm')) => (&text[..end], 1 << 20),
        Some((end, 'G' | 'g')) => (&text[..end], 1 << 30),
        _ => (text, 1usize),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|count| count.checked_mul(unit));
    bytes.filter(|bytes| (1..=SIZE_MAX).contains(bytes)).ok_or_else(|| {
        format!("{text} is no size; write bytes such as 14336, 14K, 64M, or a range 1K..64M:4")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Result<Vec<usize>, String> {
        text.parse::<SizesArgument>().map(|sizes| sizes.0)
    }

    #[test]
    fn sizes_have_units_and_ranges_factors() {
        assert_eq!(sizes("14336"), Ok(vec![14336]));
        assert_eq!(sizes("14k"), sizes("14336"));
        assert_eq!(sizes("1K..8K"), Ok(vec![1024, 2048, 4096, 8192]));
        assert_eq!(sizes("1K..64K:4"), Ok(vec![1024, 4096, 16384, 65536]));
        assert_eq!(sizes("1000..2500"), Ok(vec![1000, 2000]));
        assert_eq!(sizes("1G..1G:3"), Ok(vec![1 << 30]));
        for text in
            ["", "K", "0", "-1", "1T", "é", "4K..1K", "1K..4K:1", "1K..", "..4K", "1K..2K:x", "99G"]
        {
            assert!(sizes(text).is_err(), "{text}");
        }
        assert_eq!(sizes(SIZES_DEFAULT).unwrap().len(), 9);
    }
}
