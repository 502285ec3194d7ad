//! A report as a picture.

use super::{
    report::{Batch, Pass, Report, Setting},
    samples::Samples,
    table,
};
use crate::output::chart::{self, Chart, Mark, Shape};

/// Colours that stay apart for colour-blind eyes too (Okabe and Ito).
const PLAIN: &str = "#8a8f99";
const CHAIN: &str = "#56b4e9";
const TREE: &str = "#009e73";
const AUTO: &str = "#e69f00";

/// The whole SVG file.
pub(super) fn svg(report: &Report) -> String {
    let heading = table::heading(report);
    let heading: Vec<&str> = heading.lines().collect();
    let mut charts = Vec::new();
    if !report.decode.is_empty() {
        charts.push(decode(&report.decode));
    }
    if !report.passes.is_empty() {
        charts.push(passes(&report.passes));
    }
    if !report.batch.is_empty() {
        charts.push(batch(&report.batch));
    }
    chart::sheet(&heading, &charts)
}

fn decode(settings: &[Setting]) -> Chart {
    let marks = settings.iter().map(|setting| {
        let label = format!("{:.0}", setting.tokens_per_second.median());
        mark(&setting.name, 0.0, &setting.tokens_per_second, label, colour(&setting.name))
    });
    Chart {
        title: "Decoding with and without speculation".to_owned(),
        unit: "tokens a second; median, least and most".to_owned(),
        along: "drafted tokens: chain-N; tree-KxDxN with K children and D levels".to_owned(),
        marks: marks.collect(),
        shape: Shape::Bars,
    }
}

fn passes(passes: &[Pass]) -> Chart {
    let mut passes: Vec<&Pass> = passes.iter().collect();
    passes.sort_by_key(|pass| pass.tokens);
    let marks = passes.iter().map(|pass| {
        let cost = pass.seconds.ratios(&passes[0].seconds);
        let label = format!("{:.2}", cost.median());
        mark(&pass.tokens.to_string(), pass.tokens as f64, &cost, label, CHAIN)
    });
    let (first, seconds) = (passes[0].tokens, passes[0].seconds.median());
    Chart {
        title: "What a pass of several tokens costs".to_owned(),
        unit: format!(
            "times the pass of {first}, which takes {:.0} us; median, least and most",
            seconds * 1e6
        ),
        along: "tokens in a pass".to_owned(),
        marks: marks.collect(),
        shape: Shape::Line,
    }
}

fn batch(batches: &[Batch]) -> Chart {
    let marks = batches.iter().map(|batch| {
        let name = format!("{} {}", batch.sequences, batch.setting);
        let label = format!("{:.0}", batch.tokens_per_second.median());
        mark(&name, 0.0, &batch.tokens_per_second, label, colour(&batch.setting))
    });
    Chart {
        title: "Several sequences at the same time".to_owned(),
        unit: "tokens a second together; median, least and most".to_owned(),
        along: "sequences, and how they draft".to_owned(),
        marks: marks.collect(),
        shape: Shape::Bars,
    }
}

/// Of a setting's bars.
fn colour(setting: &str) -> &'static str {
    match setting.split('-').next() {
        Some("chain") => CHAIN,
        Some("tree") => TREE,
        Some("auto") => AUTO,
        _ => PLAIN,
    }
}

fn mark(name: &str, place: f64, samples: &Samples, label: String, colour: &'static str) -> Mark {
    Mark {
        name: name.to_owned(),
        place,
        value: samples.median(),
        least: samples.least(),
        most: samples.most(),
        label,
        colour,
    }
}
