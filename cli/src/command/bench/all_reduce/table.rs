//! A report as text, for people.

use super::report::{Fastest, Report, Row};
use crate::{
    command::bench::table::{counted, table},
    output::units,
};

/// The whole text.
pub(super) fn text(report: &Report) -> String {
    let mut parts = vec![heading(report)];
    if !report.rows.is_empty() {
        parts.push(rows(&report.rows));
    }
    for failure in &report.failures {
        parts.push(format!("{}: {}", failure.backend, failure.reason));
    }
    parts.extend(fastest(&report.fastest));
    parts.join("\n")
}

/// What was measured, on what.
pub(super) fn heading(report: &Report) -> String {
    let (facts, workload) = (&report.machine.facts, &report.workload);
    let place = match &report.machine.gpus[..] {
        [] => format!("{}, {}", facts.processor, facts.instruction_set),
        gpus => gpus.join(", "),
    };
    let ranks = match workload.virtual_ranks {
        true => format!("{} virtual ranks", workload.world),
        false => counted(workload.world, "rank"),
    };
    let fused = if workload.fused { " + residual + RMSNorm" } else { "" };
    let ranks = match workload.host_staged {
        true => format!("{ranks} that meet in host memory"),
        false => ranks,
    };
    format!(
        "all-reduce{fused}, {ranks} as threads; {place}; paceline {}\n{} calls; medians of {}",
        facts.paceline,
        workload.mode,
        counted(workload.repetitions, "repetition"),
    )
}

fn rows(rows: &[Row]) -> String {
    let mut table = table(&[
        "back end",
        "form",
        "size (B)",
        "count",
        "type",
        "redop",
        "calls",
        "time (us)",
        "p10 to p90",
        "algbw (GB/s)",
        "busbw (GB/s)",
        "#wrong",
    ]);
    for row in rows {
        let backend = match row.backend == row.served_by {
            true => row.backend.clone(),
            false => format!("{} ({})", row.backend, row.served_by),
        };
        let microseconds = |seconds: f64| format!("{:.2}", seconds * 1e6);
        let bandwidth = |value: Option<f64>| value.map_or("-".to_owned(), |gb| format!("{gb:.2}"));
        let spread = [0.1, 0.9].map(|share| microseconds(row.seconds.quantile(share)));
        table.add_row([
            backend,
            row.form.to_owned(),
            row.bytes.to_string(),
            row.count.to_string(),
            row.dtype.clone(),
            row.redop.to_owned(),
            row.calls.to_string(),
            microseconds(row.seconds.median()),
            spread.join(" to "),
            bandwidth(row.algbw),
            bandwidth(row.busbw),
            row.wrong.to_string(),
        ]);
    }
    table.to_string()
}

/// A line for each form: neighbouring sizes with the same back end are one range.
fn fastest(fastest: &[Fastest]) -> Vec<String> {
    let line = |of_form: &[Fastest]| {
        let ranges = of_form.chunk_by(|a, b| a.backend == b.backend).map(|range| {
            let size = |row: &Fastest| units::bytes(row.bytes as u64);
            let (first, last) = (&range[0], &range[range.len() - 1]);
            match range.len() {
                1 => format!("{} at {}", first.backend, size(first)),
                _ => format!("{} from {} to {}", first.backend, size(first), size(last)),
            }
        });
        let ranges: Vec<_> = ranges.collect();
        format!("fastest, {}: {}", of_form[0].form, ranges.join(", "))
    };
    fastest.chunk_by(|a, b| a.form == b.form).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_sizes_are_one_range() {
        let row = |form, bytes, backend: &str| Fastest {
            form,
            bytes,
            backend: backend.to_owned(),
            seconds: 1.0,
        };
        let lines = fastest(&[
            row("independent", 1024, "p2p"),
            row("independent", 2048, "p2p"),
            row("independent", 4096, "nccl"),
            row("dependent", 1024, "nccl"),
        ]);
        assert_eq!(
            lines,
            [
                "fastest, independent: p2p from 1.0 KiB to 2.0 KiB, nccl at 4.0 KiB",
                "fastest, dependent: nccl at 1.0 KiB"
            ]
        );
    }
}
