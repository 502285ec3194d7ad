//! `paceline doctor`: what this machine offers, and why what cannot be used cannot.

mod gpus;

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use paceline_comm::{KNOWN, Placement, Topology, backend};
use paceline_kernels::Isa;
use serde_json::{Value, json};

use crate::{
    args::DoctorArguments,
    output::{machine, print, units},
};

/// One fact: what it is about, what was found, and a reason if it cannot be used.
struct Finding {
    subject: String,
    found: String,
    reason: Option<String>,
    /// More for programs: an object, or null.
    facts: Value,
}

impl Finding {
    fn usable(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { subject: subject.into(), found: found.into(), reason: None, facts: Value::Null }
    }

    fn unusable(
        subject: impl Into<String>,
        found: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self { reason: Some(reason.into()), ..Self::usable(subject, found) }
    }

    fn with(self, facts: Value) -> Self {
        Self { facts, ..self }
    }
}

pub(crate) fn run(arguments: &DoctorArguments) -> Result<ExitCode> {
    let sections = [
        ("processor", processor()),
        ("memory", memory()),
        ("gpus", gpus::gpus()),
        ("peers", gpus::peers()),
        ("back ends", backends()),
    ];
    if arguments.json {
        let sections: serde_json::Map<String, Value> = sections
            .iter()
            .map(|(name, findings)| {
                (name.replace(' ', "_"), findings.iter().map(to_json).collect())
            })
            .collect();
        print::line(Value::Object(sections))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new();
    table.load_style(comfy_table::TableStyle::new());
    for (name, findings) in &sections {
        for (index, finding) in findings.iter().enumerate() {
            let name = if index == 0 { *name } else { "" };
            let mut found = finding.found.clone();
            if let Some(reason) = &finding.reason {
                found = format!("{found}: {reason}");
            }
            table.add_row([name, &finding.subject, &found]);
        }
    }
    print::line(table)?;
    Ok(ExitCode::SUCCESS)
}

fn to_json(finding: &Finding) -> Value {
    let mut object = json!({
        "subject": finding.subject,
        "found": finding.found,
        "usable": finding.reason.is_none(),
        "reason": finding.reason,
    });
    if let Value::Object(facts) = &finding.facts {
        for (name, fact) in facts {
            object[name] = fact.clone();
        }
    }
    object
}

fn processor() -> Vec<Finding> {
    let (model, cores) = (machine::processor(), machine::cores().to_string());
    let mut findings = vec![Finding::usable("model", model), Finding::usable("cores", cores)];
    let detected = Isa::detect();
    for isa in Isa::ALL.into_iter().rev() {
        findings.push(match isa.is_available() {
            true if isa == detected => Finding::usable(isa.to_string(), "used"),
            true => Finding::usable(isa.to_string(), "there"),
            false => Finding::unusable(
                isa.to_string(),
                "absent",
                "this processor lacks it; the next narrower one is used",
            ),
        });
    }
    findings
}

fn memory() -> Vec<Finding> {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kibibytes = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    [("MemTotal", "installed"), ("MemAvailable", "available")]
        .into_iter()
        .map(|(name, subject)| match kibibytes(name) {
            Some(amount) => Finding::usable(subject, units::bytes(amount * 1024)),
            None => Finding::unusable(subject, "unknown", "/proc/meminfo cannot be read"),
        })
        .collect()
}

/// Each back end, in this build or not, for two ranks on this machine.
fn backends() -> Vec<Finding> {
    let on = |placement, on_devices| Topology { world_size: 2, placement, on_devices };
    let (cpu, gpus) = (on(Placement::Processes, false), on(Placement::Threads, true));
    let finding = |&name: &&str| match backend::find(name) {
        Err(reason) => Finding::unusable(name, "not in this build", reason.to_string())
            .with(json!({ "compiled": false })),
        Ok(backend) => {
            let finding = match backend.probe(if name == "host" { &cpu } else { &gpus }) {
                Ok(limits) => {
                    let (least, most) = (limits.world_sizes.start(), limits.world_sizes.end());
                    Finding::usable(name, format!("usable, {least} to {most} ranks"))
                }
                Err(reason) => Finding::unusable(name, "unusable", reason.to_string()),
            };
            finding.with(json!({ "compiled": true }))
        }
    };
    KNOWN.iter().map(finding).collect()
}
