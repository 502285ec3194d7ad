//! `paceline inspect`: what a checkpoint is, what memory it takes, what would not load and why.

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use paceline_model::{
    ModelError,
    config::ModelConfig,
    eagle3::config::DraftConfig,
    weights::{Report, Source},
};
use serde_json::{Value, json};

use crate::{args::InspectArguments, command::generate::sources, output::units};

/// Exits with 1 if something would not load.
pub(crate) fn run(arguments: &InspectArguments) -> Result<ExitCode> {
    let (model, draft) = sources(&arguments.model);
    let ranks = arguments.model.tp.map_or(1, usize::from);
    let expert_parallel = arguments.model.expert_parallel;
    let config = model.config().and_then(|text| ModelConfig::from_json(&text)).ok();
    let report = Report::of_source(&model, ranks, expert_parallel);
    let mut problems = report.problems.clone();
    problems.extend(text_problems(&model, config.as_ref()));
    let points = arguments.model.capture_points.as_deref();
    let drafted = draft.as_ref().map(|source| inspect_draft(source, config.as_ref(), points));
    let draft_problems = drafted.iter().flat_map(|(_, problems)| problems.clone());
    problems.extend(draft_problems.map(|problem| format!("draft: {problem}")));
    if arguments.json {
        let draft = drafted.map(|(facts, _)| facts);
        println!("{}", as_json(&model, config.as_ref(), &report, draft, &problems));
    } else {
        print_table(&model, config.as_ref(), &report, draft.as_ref(), &problems);
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tokenizer and stop ids; weights are the report's. Without a tokenizer a model still runs.
fn text_problems(source: &Source, config: Option<&ModelConfig>) -> Vec<String> {
    let Some(config) = config else { return Vec::new() };
    let tokenizer = match source.tokenizer() {
        Err(ModelError::TokenizerMissing { .. }) => Ok(()),
        Err(error) => Err(error),
        Ok(tokenizer) => tokenizer.check_vocabulary(config.vocabulary),
    };
    let checked = tokenizer.and_then(|()| {
        let generation = source.text("generation_config.json")?;
        paceline_model::stop::stop_ids(config, generation.as_deref())
    });
    checked.err().map(|error| error.to_string()).into_iter().collect()
}

fn inspect_draft(
    source: &Source,
    target: Option<&ModelConfig>,
    points: Option<&[usize]>,
) -> (Value, Vec<String>) {
    let mut problems = Vec::new();
    let config = source.config().and_then(|text| DraftConfig::from_json(&text));
    let config = match config {
        Ok(config) => config,
        Err(error) => return (json!({"name": source.name()}), vec![error.to_string()]),
    };
    let loaded = source
        .checkpoint()
        .and_then(|checkpoint| paceline_model::weights::DraftWeights::load(&checkpoint, &config));
    if let Err(error) = loaded {
        problems.push(error.to_string());
    }
    let mut facts = json!({
        "name": source.name(),
        "kind": format!("{:?}", config.kind).split([' ', '{']).next().unwrap_or_default(),
        "hidden": config.hidden,
        "draft_vocabulary": config.draft_vocabulary,
    });
    if let Some(target) = target {
        match config.capture_points(target.layers, points) {
            Ok(points) => facts["capture_points"] = json!(points),
            Err(error) => problems.push(error.to_string()),
        }
        if config.target_hidden != target.hidden || config.vocabulary != target.vocabulary {
            problems.push(format!(
                "it was trained for width {} and {} tokens, the model has {} and {}",
                config.target_hidden, config.vocabulary, target.hidden, target.vocabulary
            ));
        }
    }
    (facts, problems)
}

/// Bytes of one token's latent rows in all layers, at 4 bytes a value.
fn cache_bytes_per_token(config: &ModelConfig) -> u64 {
    (config.layers * config.latent_width() * 4) as u64
}

fn as_json(
    source: &Source,
    config: Option<&ModelConfig>,
    report: &Report,
    draft: Option<Value>,
    problems: &[String],
) -> Value {
    let storages: serde_json::Map<String, Value> = report
        .storages
        .iter()
        .map(|(name, stored)| {
            ((*name).to_owned(), json!({"modules": stored.modules, "bytes": stored.bytes}))
        })
        .collect();
    json!({
        "name": source.name(),
        "family": config.map(|config| format!("{:?}", config.family)),
        "layers": config.map(|config| config.layers),
        "hidden": config.map(|config| config.hidden),
        "experts": config.and_then(|config| config.moe.as_ref()).map(|moe| moe.experts),
        "vocabulary": config.map(|config| config.vocabulary),
        "positions": config.map(|config| config.positions_max),
        "files": report.files,
        "tensors": report.tensors,
        "bytes": report.bytes,
        "storages": storages,
        "ranks": report.ranks.iter().map(|rank| {
            json!({"mapped_bytes": rank.mapped, "copied_bytes": rank.copied})
        }).collect::<Vec<_>>(),
        "cache_bytes_per_token_f32": config.map(cache_bytes_per_token),
        "draft": draft,
        "warnings": config.map(|config| config.warnings.clone()),
        "problems": problems,
    })
}

fn print_table(
    source: &Source,
    config: Option<&ModelConfig>,
    report: &Report,
    draft: Option<&Source>,
    problems: &[String],
) {
    let mut table = Table::new();
    table.load_style(comfy_table::TableStyle::new());
    table.add_row(["checkpoint".to_owned(), source.name().into_owned()]);
    if let Some(config) = config {
        let experts = config.moe.as_ref().map_or_else(String::new, |moe| {
            format!(
                ", {} experts ({} a token, {} shared)",
                moe.experts, moe.experts_per_token, moe.shared_experts
            )
        });
        table.add_row([
            "model".to_owned(),
            format!(
                "{:?}, {} layers of width {}{experts}",
                config.family, config.layers, config.hidden
            ),
        ]);
        let limits = format!("{} tokens, {} positions", config.vocabulary, config.positions_max);
        table.add_row(["vocabulary".to_owned(), limits]);
        let cache = units::bytes(cache_bytes_per_token(config));
        table.add_row(["cache".to_owned(), format!("{cache} a token in f32, half in bf16")]);
        for warning in &config.warnings {
            table.add_row(["not understood".to_owned(), warning.clone()]);
        }
    }
    let files = format!(
        "{} in {} tensors, {} files",
        units::bytes(report.bytes),
        report.tensors,
        report.files
    );
    table.add_row(["weights".to_owned(), files]);
    for (name, stored) in &report.storages {
        let amount = format!("{} in {} modules", units::bytes(stored.bytes), stored.modules);
        table.add_row([format!("  {name}"), amount]);
    }
    for (rank, memory) in report.ranks.iter().enumerate() {
        let (mapped, copied) = (units::bytes(memory.mapped), units::bytes(memory.copied));
        table.add_row([format!("rank {rank}"), format!("{mapped} mapped, {copied} copied")]);
    }
    if let Some(draft) = draft {
        table.add_row(["draft".to_owned(), draft.name().into_owned()]);
    }
    println!("{table}");
    match problems {
        [] => println!("It would load."),
        _ => println!("It would not load:"),
    }
    for problem in problems {
        println!("  {problem}");
    }
}
