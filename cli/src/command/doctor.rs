//! `paceline doctor`: what this machine offers, and why what cannot be used cannot.

use std::{path::Path, process::ExitCode};

use anyhow::Result;
use comfy_table::Table;
use paceline_comm::{COMPILED, Placement, Topology};
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
}

pub(crate) fn run(arguments: &DoctorArguments) -> Result<ExitCode> {
    let sections = [
        ("processor", processor()),
        ("memory", memory()),
        ("gpus", gpus()),
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
    json!({
        "subject": finding.subject,
        "found": finding.found,
        "usable": finding.reason.is_none(),
        "reason": finding.reason,
    })
}

fn usable(subject: impl Into<String>, found: impl Into<String>) -> Finding {
    Finding { subject: subject.into(), found: found.into(), reason: None }
}

fn processor() -> Vec<Finding> {
    let (model, cores) = (machine::processor(), machine::cores().to_string());
    let mut findings = vec![usable("model", model), usable("cores", cores)];
    let detected = Isa::detect();
    for isa in Isa::ALL.into_iter().rev() {
        findings.push(match isa.is_available() {
            true if isa == detected => usable(isa.to_string(), "used"),
            true => usable(isa.to_string(), "there"),
            false => Finding {
                subject: isa.to_string(),
                found: "absent".to_owned(),
                reason: Some("this processor lacks it; the next narrower one is used".to_owned()),
            },
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
            Some(amount) => usable(subject, units::bytes(amount * 1024)),
            None => Finding {
                subject: subject.to_owned(),
                found: "unknown".to_owned(),
                reason: Some("/proc/meminfo cannot be read".to_owned()),
            },
        })
        .collect()
}

/// GPUs as the NVIDIA driver lists them. This version computes on the CPU only, and says so.
fn gpus() -> Vec<Finding> {
    let driver = Path::new("/proc/driver/nvidia");
    let entries = std::fs::read_dir(driver.join("gpus")).ok().into_iter().flatten().flatten();
    let mut findings: Vec<Finding> = entries
        .map(|entry| {
            let text = std::fs::read_to_string(entry.path().join("information"));
            let text = text.unwrap_or_default();
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            Finding {
                subject: entry.file_name().to_string_lossy().into_owned(),
                found: model.unwrap_or("unknown model").trim().to_owned(),
                reason: Some("this version of paceline computes on the CPU only".to_owned()),
            }
        })
        .collect();
    if findings.is_empty() {
        let reason = match driver.exists() {
            true => "the NVIDIA driver lists no GPU (and this version computes on the CPU only)",
            false => "no NVIDIA driver is loaded (and this version computes on the CPU only)",
        };
        findings.push(Finding {
            subject: "NVIDIA".to_owned(),
            found: "none".to_owned(),
            reason: Some(reason.to_owned()),
        });
    }
    findings
}

/// Each back end of this build, for two ranks on this machine.
fn backends() -> Vec<Finding> {
    let topology = Topology { world_size: 2, placement: Placement::Processes };
    let finding = |backend: &&dyn paceline_comm::Backend| match backend.probe(&topology) {
        Ok(limits) => {
            let (least, most) = (limits.world_sizes.start(), limits.world_sizes.end());
            usable(backend.name(), format!("usable, {least} to {most} ranks"))
        }
        Err(reason) => Finding {
            subject: backend.name().to_owned(),
            found: "unusable".to_owned(),
            reason: Some(reason.to_string()),
        },
    };
    COMPILED.iter().map(finding).collect()
}
