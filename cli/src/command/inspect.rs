//! `paceline inspect`: what a checkpoint is, what memory it takes, what would not load and why.

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use paceline_model::{
    ModelError,
    config::ModelConfig,
    weights::{DraftWeights, Report, Source},
};
use serde_json::{Value, json};

use crate::{
    args::InspectArguments,
    launch::sources,
    output::{print, units},
};

/// Exits with 1 if something would not load.
pub(crate) fn run(arguments: &InspectArguments) -> Result<ExitCode> {
    let (model, draft) = sources(&arguments.model);
    let ranks = arguments.model.tp.map_or(1, usize::from);
    let expert_parallel = arguments.model.expert_parallel;
    let config = model.model_config().ok();
    let report = Report::of_source(&model, ranks, expert_parallel);
    let mut problems = report.problems.clone();
    let texts = inspect_texts(&model, config.as_ref());
    problems.extend(texts.problems);
    let points = arguments.model.capture_points.as_deref();
    let drafted = draft.as_ref().map(|source| inspect_draft(source, config.as_ref(), points));
    let draft_problems = drafted.iter().flat_map(|(_, problems)| problems.clone());
    problems.extend(draft_problems.map(|problem| format!("draft: {problem}")));
    if arguments.json {
        let draft = drafted.map(|(facts, _)| facts);
        print::line(as_json(&model, config.as_ref(), &report, draft, texts.prompts, &problems))?;
    } else {
        let draft = drafted.as_ref().map(|(facts, _)| facts);
        print::line(as_text(&model, config.as_ref(), &report, draft, texts.prompts, &problems))?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What there is besides weights: how prompts can be given, and what is wrong with it.
struct Texts {
    prompts: &'static str,
    problems: Vec<String>,
}

/// Tokenizer, chat template and stop ids. Without the first two a model still runs.
fn inspect_texts(source: &Source, config: Option<&ModelConfig>) -> Texts {
    let mut texts = Texts { prompts: "unknown", problems: Vec::new() };
    let Some(config) = config else { return texts };
    let stops = source.stop_ids(config);
    let stop_ids = stops.as_deref().unwrap_or_default().to_vec();
    texts.problems.extend(stops.err().map(|error| error.to_string()));
    let tokenizer = source.tokenizer().and_then(|tokenizer| {
        tokenizer.check_vocabulary(config.vocabulary)?;
        tokenizer.check_stop_ids(&stop_ids)?;
        Ok(tokenizer)
    });
    match tokenizer {
        Ok(tokenizer) => match source.chat_template(config, &tokenizer) {
            Ok(_) => texts.prompts = "text, chat, token ids",
            Err(ModelError::TemplateMissing { .. }) => {
                texts.prompts = "text, token ids (no chat template)";
            }
            Err(error) => texts.problems.push(error.to_string()),
        },
        Err(ModelError::TokenizerMissing { .. }) => texts.prompts = "token ids (no tokenizer)",
        Err(error) => texts.problems.push(error.to_string()),
    }
    texts
}

fn inspect_draft(
    source: &Source,
    target: Option<&ModelConfig>,
    points: Option<&[usize]>,
) -> (Value, Vec<String>) {
    let mut problems = Vec::new();
    let config = match source.draft_config() {
        Ok(config) => config,
        Err(error) => return (json!({"name": source.name()}), vec![error.to_string()]),
    };
    let loaded = source.checkpoint().and_then(|checkpoint| {
        DraftWeights::load(&checkpoint, &config)?;
        Ok(checkpoint.bytes())
    });
    let bytes = loaded.map_err(|error| problems.push(error.to_string())).ok();
    let mut facts = json!({
        "name": source.name(),
        "kind": format!("{:?}", config.kind).split([' ', '{']).next().unwrap_or_default(),
        "bytes": bytes,
        "hidden": config.hidden,
        "draft_vocabulary": config.draft_vocabulary,
    });
    if let Some(target) = target {
        match config.capture_points(target.layers, points) {
            Ok(points) => facts["capture_points"] = json!(points),
            Err(error) => problems.push(error.to_string()),
        }
        problems.extend(config.check_target(target).err().map(|error| error.to_string()));
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
    prompts: &str,
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
        "prompts": prompts,
        "warnings": config.map(|config| config.warnings.clone()),
        "problems": problems,
    })
}

fn as_text(
    source: &Source,
    config: Option<&ModelConfig>,
    report: &Report,
    draft: Option<&Value>,
    prompts: &str,
    problems: &[String],
) -> String {
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
        "{} in {} tensors, files: {}",
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
        let name = draft["name"].as_str().unwrap_or_default();
        let amount = units::bytes(draft["bytes"].as_u64().unwrap_or(0));
        table.add_row(["draft".to_owned(), format!("{name}, {amount}, on rank 0 only")]);
    }
    table.add_row(["prompts".to_owned(), prompts.to_owned()]);
    let verdict = match problems {
        [] => "It would load.".to_owned(),
        _ => format!("It would not load:\n  {}", problems.join("\n  ")),
    };
    format!("{table}\n{verdict}")
}
