//! `paceline inspect`: what a checkpoint is, what memory it takes, what would not load and why.

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use paceline_kernels::DType;
use paceline_model::{
    ModelError,
    config::ModelConfig,
    weights::{DraftWeights, Report, Source},
};
use paceline_runtime::CONTEXT_DEFAULT_MAX;
use serde_json::{Value, json};

use crate::{
    args::InspectArguments,
    launch::{check_directories, sources},
    output::{print, units},
};

/// Exits with 1 if something would not load.
pub(crate) fn run(arguments: &InspectArguments) -> Result<ExitCode> {
    check_directories(&arguments.model)?;
    let (model, draft) = sources(&arguments.model);
    let ranks = arguments.model.tp.map_or(1, usize::from);
    let expert_parallel = arguments.model.expert_parallel;
    let config = model.model_config().ok();
    let report = Report::of_source(&model, ranks, expert_parallel);
    let mut problems = report.problems.clone();
    let texts = inspect_texts(&model, config.as_ref());
    problems.extend(texts.problems);
    let cache = config.as_ref().map(|config| Cache::new(config, arguments.context));
    problems.extend(cache.as_ref().and_then(|cache| cache.problem.clone()));
    let points = arguments.model.capture_points.as_deref();
    let drafted = draft.as_ref().map(|source| inspect_draft(source, config.as_ref(), points));
    let draft_problems = drafted.iter().flat_map(|(_, problems)| problems.clone());
    problems.extend(draft_problems.map(|problem| format!("draft: {problem}")));
    let found = Found {
        source: &model,
        config: config.as_ref(),
        report: &report,
        cache: cache.as_ref(),
        draft: drafted.map(|(facts, _)| facts),
        prompts: texts.prompts,
        problems: &problems,
    };
    match arguments.json {
        true => print::line(found.as_json())?,
        false => print::line(found.as_text())?,
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The cache of one sequence, which every rank has whole.
struct Cache {
    /// Length of the sequence.
    context: usize,
    /// Bytes in f32.
    bytes: u64,
    /// Why the model cannot have it.
    problem: Option<String>,
}

impl Cache {
    fn new(config: &ModelConfig, asked: Option<usize>) -> Self {
        let positions = config.positions_max;
        let context = asked.unwrap_or(positions.min(CONTEXT_DEFAULT_MAX));
        let problem = (context > positions)
            .then(|| format!("--context {context}: this model has {positions} positions"));
        Self { context, bytes: config.cache_bytes(context, DType::F32), problem }
    }
}

/// All that was found.
struct Found<'a> {
    source: &'a Source,
    config: Option<&'a ModelConfig>,
    report: &'a Report,
    cache: Option<&'a Cache>,
    draft: Option<Value>,
    prompts: &'a str,
    problems: &'a [String],
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

impl Found<'_> {
    fn as_json(&self) -> Value {
        let Self { config, report, .. } = self;
        let storages: serde_json::Map<String, Value> = report
            .storages
            .iter()
            .map(|(name, stored)| {
                ((*name).to_owned(), json!({"modules": stored.modules, "bytes": stored.bytes}))
            })
            .collect();
        json!({
            "name": self.source.name(),
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
            "cache_bytes_per_token_f32": config.map(|config| config.cache_bytes(1, DType::F32)),
            "context": self.cache.map(|cache| cache.context),
            "cache_bytes_f32": self.cache.map(|cache| cache.bytes),
            "draft": self.draft,
            "prompts": self.prompts,
            "warnings": config.map(|config| config.warnings.clone()),
            "problems": self.problems,
        })
    }

    fn as_text(&self) -> String {
        let Self { source, config, report, .. } = self;
        let mut table = Table::new();
        table.load_style(comfy_table::TableStyle::new());
        table.add_row(["checkpoint".to_owned(), source.name().into_owned()]);
        config.iter().for_each(|config| add_model(&mut table, config));
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
            let mut amount = format!("{mapped} mapped, {copied} copied");
            if let Some(cache) = self.cache {
                let total = units::bytes(memory.total().saturating_add(cache.bytes));
                let bytes = units::bytes(cache.bytes);
                amount += &format!(
                    ", {bytes} cache of {} tokens in f32: {total}, without working memory",
                    cache.context
                );
            }
            table.add_row([format!("rank {rank}"), amount]);
        }
        if let Some(draft) = &self.draft {
            let name = draft["name"].as_str().unwrap_or_default();
            let amount = units::bytes(draft["bytes"].as_u64().unwrap_or(0));
            table.add_row(["draft".to_owned(), format!("{name}, {amount}, on rank 0 only")]);
        }
        table.add_row(["prompts".to_owned(), self.prompts.to_owned()]);
        format!("{table}\n{}", self.verdict())
    }

    /// Whether it would load, and the first problems if not.
    fn verdict(&self) -> String {
        let count = self.problems.len();
        if count == 0 {
            return "It would load.".to_owned();
        }
        let shown = &self.problems[..count.min(PROBLEMS_SHOWN_MAX)];
        let mut text = format!("It would not load; problems: {count}\n  {}", shown.join("\n  "));
        if count > shown.len() {
            text += &format!("\n  and {} more (--json lists them all)", count - shown.len());
        }
        // Without ranks the problem is how the model is split, or a file that cannot be read.
        if !self.report.problems.is_empty() && !self.report.ranks.is_empty() {
            text += "\nUse the configuration and the weights of one and the same checkpoint.";
        }
        text
    }
}

/// Most problems that people are shown.
const PROBLEMS_SHOWN_MAX: usize = 20;

fn add_model(table: &mut Table, config: &ModelConfig) {
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
    let cache = units::bytes(config.cache_bytes(1, DType::F32));
    table.add_row(["cache".to_owned(), format!("{cache} a token in f32, half in bf16")]);
    for warning in &config.warnings {
        table.add_row(["not understood".to_owned(), warning.clone()]);
    }
}
