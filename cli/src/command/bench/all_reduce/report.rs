//! What a measurement found, as data. `--json` prints it as it is; the table and the plot show it.

use serde::Serialize;

use super::{measurement::Measured, plan::Form};
use crate::{command::bench::samples::Samples, output::machine::Facts};

/// Everything.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) workload: Workload,
    /// By back end, form and size.
    pub(super) rows: Vec<Row>,
    /// Back ends that measured nothing, or not everything.
    pub(super) failures: Vec<Failure>,
    /// Of each form and size that was measured.
    pub(super) fastest: Vec<Fastest>,
}

/// Where it was measured.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    #[serde(flatten)]
    pub(super) facts: Facts,
    /// One for each GPU that ranks are on; none on the CPU.
    pub(super) gpus: Vec<String>,
}

/// What was asked.
#[derive(Debug, Serialize)]
pub(super) struct Workload {
    pub(super) world: usize,
    pub(super) device: &'static str,
    /// Whether several ranks share a GPU.
    pub(super) virtual_ranks: bool,
    /// Whether GPUs met in pinned host memory though they might not have to.
    pub(super) host_staged: bool,
    /// Whether residual addition and RMSNorm were part of each call.
    pub(super) fused: bool,
    pub(super) mode: &'static str,
    pub(super) warm_up: usize,
    pub(super) repetitions: usize,
}

/// One back end's calls of one size, in one form.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) backend: String,
    /// The back end that the policy chose: another name only under `auto`.
    pub(super) served_by: &'static str,
    pub(super) form: &'static str,
    pub(super) bytes: usize,
    pub(super) count: usize,
    #[serde(rename = "type")]
    pub(super) dtype: String,
    pub(super) redop: &'static str,
    /// In a row.
    pub(super) calls: usize,
    /// Of a call.
    pub(super) seconds: Samples,
    /// Of making an input, which is not in `seconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) producer_seconds: Option<Samples>,
    /// 10⁹ bytes a second, by the median; none where making inputs took as long as everything.
    pub(super) algbw: Option<f64>,
    /// As nccl-tests define it: `algbw * 2 (n - 1) / n`.
    pub(super) busbw: Option<f64>,
    /// Elements on all ranks that are not the exact sum, after the last repetition.
    pub(super) wrong: u64,
}

impl Row {
    pub(super) fn new(backend: &str, measured: Measured, world: usize) -> Self {
        let Measured { case, seconds, producer_seconds, wrong, served_by } = measured;
        let median = seconds.median();
        let algbw = (median > 0.0).then(|| case.bytes() as f64 / median * 1e-9);
        Self {
            backend: backend.to_owned(),
            served_by,
            form: case.form.name(),
            bytes: case.bytes(),
            count: case.count(),
            dtype: case.dtype.to_string(),
            redop: "sum",
            calls: case.calls,
            seconds,
            producer_seconds: (case.form == Form::Dependent).then_some(producer_seconds),
            algbw,
            busbw: algbw.map(|algbw| algbw * 2.0 * (world - 1) as f64 / world as f64),
            wrong,
        }
    }
}

/// A back end that did not measure everything.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    pub(super) backend: String,
    pub(super) reason: String,
}

/// The back end with the least median time.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Fastest {
    pub(super) form: &'static str,
    pub(super) bytes: usize,
    pub(super) backend: String,
    pub(super) seconds: f64,
}

/// By form, in the order of the rows, and by size.
pub(super) fn fastest(rows: &[Row]) -> Vec<Fastest> {
    let mut fastest: Vec<Fastest> = Vec::new();
    for row in rows.iter().filter(|row| row.wrong == 0) {
        let seconds = row.seconds.median();
        let (form, bytes) = (row.form, row.bytes);
        let candidate = Fastest { form, bytes, backend: row.backend.clone(), seconds };
        match fastest.iter_mut().find(|other| (other.form, other.bytes) == (form, bytes)) {
            None => fastest.push(candidate),
            Some(other) if seconds < other.seconds => *other = candidate,
            Some(_) => {}
        }
    }
    fastest.sort_by(|a, b| (b.form, a.bytes).cmp(&(a.form, b.bytes)));
    fastest
}

#[cfg(test)]
pub(super) mod tests {
    use paceline_kernels::DType;

    use super::{super::plan::Case, *};

    /// A row of an independent case in bf16 over four ranks.
    pub(in super::super) fn row(backend: &str, count: usize, seconds: f64, wrong: u64) -> Row {
        let form = Form::Independent;
        let measured = Measured {
            case: Case { form, shape: [1, count], dtype: DType::BF16, calls: 2 },
            seconds: [seconds, 2.0 * seconds, 0.5 * seconds].into_iter().collect(),
            producer_seconds: Samples::default(),
            wrong,
            served_by: "host",
        };
        Row::new(backend, measured, 4)
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let row = row("host", 500_000, 1e-3, 0);
        assert_eq!((row.bytes, row.count), (1_000_000, 500_000));
        assert!((row.algbw.unwrap() - 1.0).abs() < 1e-9);
        assert!((row.busbw.unwrap() - 1.5).abs() < 1e-9);
        let nothing = super::tests::row("host", 8, 0.0, 0);
        assert_eq!((nothing.algbw, nothing.busbw), (None, None));
    }

    #[test]
    fn wrong_results_are_never_the_fastest() {
        let rows = [
            row("a", 2048, 9.0, 0),
            row("a", 512, 3.0, 0),
            row("b", 2048, 8.0, 0),
            row("b", 512, 1.0, 7),
        ];
        let fastest = fastest(&rows);
        let names: Vec<_> = fastest.iter().map(|row| (row.bytes, row.backend.as_str())).collect();
        assert_eq!(names, [(1024, "a"), (4096, "b")]);
    }
}
