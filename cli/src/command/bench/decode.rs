//! `paceline bench decode`: from its arguments to the report. What is measured and how is in
//! [`super::measurement`]. Start reading at [`run`].

use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use paceline_runtime::{Engine, EngineOptions};
use paceline_spec::TreeParameters;

use super::{
    measurement::Measurement,
    plot, random_draft,
    report::{self, Machine, Report},
    table,
};
use crate::{
    args::{DecodeArguments, MeasurementArguments, SettingArgument},
    launch,
    output::{file, machine::Facts, print},
};

/// Two words name this command.
const COMMAND_WORDS: usize = 2;

pub(super) fn run(arguments: &DecodeArguments) -> Result<ExitCode> {
    if let Some(path) = &arguments.report.plot {
        // Before minutes of measuring.
        file::check(path)?;
    }
    let mut options = launch::base_options(&arguments.run);
    let settings = settings(&arguments.measurement, options.draft.is_some())?;
    make_room(&mut options, &settings);
    // What a run finds in the cache it does not compute, so it would not be measured.
    options.prefix_reuse = false;
    let measured = &arguments.measurement;
    let (batch_max, pass_max) = (measured.batch.iter().max(), measured.passes.iter().max());
    // A pass may have a row of each sequence, so this makes room for the passes too.
    options.sequences_max = *batch_max.max(pass_max).unwrap_or(&1);
    options.waiting_max = options.sequences_max;
    let mut draft_name = options.draft.as_ref().map(|source| source.name().into_owned());
    // Only rank 0 has a draft.
    let drafts = !arguments.run.distributed.own_group;
    let folder = match (&options.draft, measured.random_draft) {
        (Some(draft), true) if drafts => {
            let (folder, random) = random_draft::write(draft)?;
            options.draft = Some(random);
            draft_name = draft_name.map(|name| name + " with random weights");
            Some(folder)
        }
        (None, true) => bail!("--random-draft needs a draft for its shape: add --draft"),
        _ => None,
    };
    let quiet = arguments.report.quiet;
    let session = launch::launch(&arguments.run, options, COMMAND_WORDS, quiet)?;
    // The files are mapped now, so nothing is left over if this program is ended.
    drop(folder);
    let Some(mut session) = session else { return Ok(ExitCode::SUCCESS) };
    let measurement = Measurement::new(arguments, &session.engine, settings)?;
    let engine = &mut session.engine;
    let decode = measurement.decode(engine)?;
    let report = Report {
        machine: machine(engine, draft_name),
        workload: measurement.workload(),
        verdicts: report::verdicts(&decode),
        decode,
        prompt: measurement.prompt(engine)?,
        passes: measurement.passes(engine)?,
        batch: measurement.batch(engine)?,
    };
    match arguments.report.json {
        true => print::line(serde_json::to_string(&report)?)?,
        false => print::line(table::text(&report))?,
    }
    if let Some(path) = &arguments.report.plot {
        file::write(path, plot::svg(&report).as_bytes())?;
    }
    // Last, so that a rank that fails to end takes no result away.
    session.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// What to compare: what was asked for, or what is useful.
fn settings(arguments: &MeasurementArguments, has_draft: bool) -> Result<Vec<SettingArgument>> {
    let tree = |topk, depth, drafted: usize| {
        TreeParameters::new(topk, depth, drafted + 1).map(SettingArgument::Tree)
    };
    if arguments.settings.is_empty() {
        let mut settings = vec![SettingArgument::Off];
        if has_draft {
            settings.extend([1, 2, 3, 4, 6].map(SettingArgument::Chain));
            settings.extend([tree(2, 4, 7)?, tree(4, 4, 15)?, SettingArgument::Auto]);
        }
        return Ok(settings);
    }
    if let Some(setting) =
        arguments.settings.iter().find(|&&setting| setting != SettingArgument::Off)
    {
        ensure!(has_draft, "{setting} needs a draft: name its directory with --draft");
    }
    Ok(arguments.settings.clone())
}

/// Lets the engine set memory aside for the settings. Only what does not fit anyway is added, since
/// `auto` then considers it too.
fn make_room(options: &mut EngineOptions, settings: &[SettingArgument]) {
    for setting in settings {
        match *setting {
            SettingArgument::Chain(drafted) => {
                options.chain_drafted_max = options.chain_drafted_max.max(drafted);
            }
            SettingArgument::Tree(tree) => {
                let rows =
                    |tree: &TreeParameters| tree.nodes().max(tree.topk() * (tree.depth() - 1));
                let most = options.trees.iter().map(rows).max().unwrap_or(0);
                if rows(&tree) > most {
                    options.trees.push(tree);
                }
            }
            SettingArgument::Off | SettingArgument::Auto => {}
        }
    }
}

fn machine(engine: &Engine, draft: Option<String>) -> Machine {
    let facts = Facts::find();
    let options = engine.options();
    Machine {
        threads: match options.threads {
            0 => (facts.cores / engine.ranks()).max(1),
            threads => threads,
        },
        facts,
        dtype: options.dtype.to_string(),
        ranks: engine.ranks(),
        model: options.model.name().into_owned(),
        draft,
    }
}
