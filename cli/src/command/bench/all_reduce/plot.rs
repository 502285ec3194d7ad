//! A report as a picture.

use super::{
    report::{Report, Row},
    table,
};
use crate::output::{
    chart::{self, Chart, Mark, Shape},
    units,
};

/// Colours that stay apart for colour-blind eyes too (Okabe and Ito).
const COLOURS: [&str; 7] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8f99"];

/// The whole SVG file: a chart for each form.
pub(super) fn svg(report: &Report) -> String {
    let heading = table::heading(report);
    let heading: Vec<&str> = heading.lines().collect();
    let mut backends: Vec<&str> = report.rows.iter().map(|row| row.backend.as_str()).collect();
    backends.dedup();
    let mut forms: Vec<&str> = report.rows.iter().map(|row| row.form).collect();
    forms.sort_unstable();
    forms.dedup();
    // The independent form first.
    let charts = forms.iter().rev().map(|form| {
        let rows = report.rows.iter().filter(|row| row.form == *form);
        let marks = rows.map(|row| {
            let index = backends.iter().position(|name| *name == row.backend).unwrap_or(0);
            mark(row, COLOURS[index % COLOURS.len()])
        });
        Chart {
            title: format!("All-reduce, {form} calls"),
            unit: "microseconds a call; median, p10 and p90".to_owned(),
            along: "bytes".to_owned(),
            marks: marks.collect(),
            shape: Shape::Curves,
        }
    });
    chart::sheet(&heading, &charts.collect::<Vec<_>>())
}

fn mark(row: &Row, colour: &'static str) -> Mark {
    let microseconds = |share| row.seconds.quantile(share) * 1e6;
    Mark {
        name: units::bytes(row.bytes as u64),
        place: row.bytes as f64,
        value: microseconds(0.5),
        least: microseconds(0.1),
        most: microseconds(0.9),
        label: row.backend.clone(),
        colour,
    }
}
