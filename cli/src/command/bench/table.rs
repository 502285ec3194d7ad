//! A report as text, for people.

use comfy_table::{CellAlignment, Table};

use super::{
    report::{Batch, Machine, Pass, Report, Setting, Verdict},
    samples::Samples,
};

/// The whole text.
pub(super) fn text(report: &Report) -> String {
    let mut parts = vec![heading(report)];
    if !report.decode.is_empty() {
        parts.push(decode(&report.decode, report.machine.ranks));
    }
    if let Some(prompt) = &report.prompt {
        let speed = &prompt.tokens_per_second;
        parts.push(format!(
            "prompt of {} tokens: {:.0} tok/s ({})",
            prompt.tokens,
            speed.median(),
            spread(speed, 0)
        ));
    }
    if !report.passes.is_empty() {
        parts.push(passes(&report.passes, report.machine.ranks));
    }
    if !report.batch.is_empty() {
        parts.push(batch(&report.batch));
    }
    parts.extend(report.verdicts.iter().map(verdict));
    parts.join("\n")
}

/// What was measured, on what.
pub(super) fn heading(report: &Report) -> String {
    let (machine, workload) = (&report.machine, &report.workload);
    format!(
        "{}\n{} prompts, answers of {} tokens, greedy; medians of {} runs",
        place(machine),
        workload.prompts,
        workload.tokens,
        workload.repetitions
    )
}

fn place(machine: &Machine) -> String {
    let draft = machine.draft.as_ref().map_or_else(String::new, |draft| format!(" with {draft}"));
    format!(
        "{}{draft}, {}, {} x {}; {}, {}; paceline {}",
        machine.model,
        machine.dtype,
        counted(machine.ranks, "rank"),
        counted(machine.threads, "thread"),
        machine.facts.processor,
        machine.facts.instruction_set,
        machine.facts.paceline
    )
}

pub(super) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn decode(settings: &[Setting], ranks: usize) -> String {
    let mut table = table(&[
        "decoding",
        "tok/s",
        "least to most",
        "relative",
        "tokens a round",
        "drafting",
        "all-reduce",
        "answers",
    ]);
    let base = settings.first().map(|setting| &setting.tokens_per_second);
    for setting in settings {
        let speed = &setting.tokens_per_second;
        let relative = base.map_or(1.0, |base| speed.ratio(base));
        let reduces = match ranks {
            1 => "-".to_owned(),
            _ => percent(setting.all_reduce_share),
        };
        table.add_row([
            setting.name.clone(),
            format!("{:.0}", speed.median()),
            spread(speed, 0),
            format!("{relative:.2}"),
            format!("{:.2}", setting.tokens_per_round),
            percent(setting.draft_share),
            reduces,
            if setting.same_tokens { "same" } else { "DIFFERENT" }.to_owned(),
        ]);
    }
    table.to_string()
}

fn passes(passes: &[Pass], ranks: usize) -> String {
    let heads =
        ["pass of tokens", "us", "least to most", "of the first", "us a token", "all-reduce"];
    let mut table = table(&heads);
    for pass in passes {
        let microseconds: Samples = pass.seconds.iter().map(|seconds| seconds * 1e6).collect();
        let reduces = match ranks {
            1 => "-".to_owned(),
            _ => percent(pass.all_reduce_share.median()),
        };
        table.add_row([
            pass.tokens.to_string(),
            format!("{:.0}", microseconds.median()),
            spread(&microseconds, 0),
            format!("{:.2}", pass.seconds.ratio(&passes[0].seconds)),
            format!("{:.0}", microseconds.median() / pass.tokens as f64),
            reduces,
        ]);
    }
    table.to_string()
}

fn batch(batches: &[Batch]) -> String {
    let mut table = table(&["sequences", "setting", "tok/s together", "least to most", "relative"]);
    for batch in batches {
        let speed = &batch.tokens_per_second;
        let alone = batches.iter().find(|other| other.setting == batch.setting);
        let relative = alone.map_or(1.0, |alone| speed.ratio(&alone.tokens_per_second));
        table.add_row([
            batch.sequences.to_string(),
            batch.setting.clone(),
            format!("{:.0}", speed.median()),
            spread(speed, 0),
            format!("{relative:.2}"),
        ]);
    }
    let preemptions: usize = batches.iter().map(|batch| batch.preemptions).sum();
    match preemptions {
        0 => table.to_string(),
        _ => format!("{table}\nThe cache was full {preemptions} times: sequences had to wait."),
    }
}

fn verdict(verdict: &Verdict) -> String {
    format!(
        "{}: {:.3} (at least {:.2} wanted: {})",
        verdict.compared,
        verdict.ratio,
        verdict.at_least,
        if verdict.holds { "yes" } else { "NO" }
    )
}

/// A table whose first column is text and whose others are numbers.
pub(super) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::TableStyle::new());
    table.set_header(heads.iter().copied());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn spread(samples: &Samples, decimals: usize) -> String {
    format!("{:.decimals$} to {:.decimals$}", samples.least(), samples.most())
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
