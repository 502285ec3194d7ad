//! `paceline bench all-reduce`: from its arguments to the report. What is measured is in [`plan`],
//! how in [`measurement`], on what in [`host`] and [`device`]; what it found in [`report`], and how
//! that is shown in [`table`] and [`plot`]. Start reading at [`run`].

mod device;
mod host;
mod inputs;
mod measurement;
mod place;
mod plan;
mod plot;
mod report;
mod table;

use std::{collections::HashSet, process::ExitCode, sync::Arc};

use anyhow::{Result, bail, ensure};
use paceline_comm::{Backend, COMPILED, Placement, Topology, backend};

use self::{
    device::Devices,
    inputs::Inputs,
    measurement::Outcome,
    plan::Plan,
    report::{Failure, Machine, Report, Row, Workload},
};
use crate::{
    args::{AllReduceArguments, DeviceArgument, ModeArgument},
    output::{file, machine::Facts, print, progress::StepsBar},
};

/// All back ends of this build, as far as they can be used.
const ALL: &str = "all";
/// The policy's choice for each size.
const AUTO: &str = "auto";
/// The back end for tensors in the memory of the machine, and the only one.
const HOST: &str = "host";

pub(super) fn run(arguments: &AllReduceArguments) -> Result<ExitCode> {
    let plan = Plan::new(&arguments.place, &arguments.calls)?;
    let (names, mut failures) = backends(&arguments.place.backends, arguments.place.device, &plan)?;
    let devices = match arguments.place.device {
        DeviceArgument::Cpu => None,
        DeviceArgument::Cuda => Some(Devices::open(plan.world, arguments.place.virtual_ranks)?),
    };
    ensure!(!names.is_empty(), "no back end can be measured: {}", reasons(&failures));
    let mut rows = Vec::new();
    let mut all_well = true;
    for name in names {
        let outcome = measure(&plan, &name, devices.as_ref(), arguments.report.quiet);
        for measured in outcome.measured {
            all_well &= measured.wrong == 0;
            rows.push(Row::new(&name, measured, plan.world));
        }
        if let Some(error) = outcome.failure {
            all_well = false;
            failures.push(Failure { backend: name, reason: format!("{error:#}") });
        }
    }
    let report = Report {
        machine: Machine {
            facts: Facts::find(),
            gpus: devices.as_ref().map_or(Ok(Vec::new()), Devices::names)?,
        },
        workload: Workload {
            world: plan.world,
            device: devices.as_ref().map_or("cpu", |_| "cuda"),
            virtual_ranks: devices.as_ref().is_some_and(Devices::are_shared),
            host_staged: plan.host_staged,
            fused: plan.fused,
            mode: match plan.mode {
                ModeArgument::Graph => "graph",
                ModeArgument::Eager => "eager",
            },
            warm_up: plan.warm_up,
            repetitions: plan.repetitions,
        },
        fastest: report::fastest(&rows),
        rows,
        failures,
    };
    match arguments.report.json {
        true => print::line(serde_json::to_string(&report)?)?,
        false => print::line(table::text(&report))?,
    }
    if let Some(path) = &arguments.report.plot {
        file::write(path, plot::svg(&report).as_bytes())?;
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The names to measure, and why others are left out. What was asked for by name and cannot be
/// used is an error; of `all`, it is left out with its reason.
fn backends(
    asked: &[String],
    device: DeviceArgument,
    plan: &Plan,
) -> Result<(Vec<String>, Vec<Failure>)> {
    let (mut names, mut left_out) = (Vec::new(), Vec::new());
    for name in asked {
        match name.as_str() {
            ALL => {
                let here = COMPILED.iter().filter(|backend| is_for(device, backend.name()));
                for (name, usable) in here.map(|backend| (backend.name(), usable(*backend, plan))) {
                    match usable {
                        Ok(()) => names.push(name.to_owned()),
                        Err(reason) => left_out
                            .push(Failure { backend: name.to_owned(), reason: reason.to_string() }),
                    }
                }
            }
            AUTO => names.push(name.clone()),
            _ => {
                let backend = backend::find(name)?;
                match device {
                    _ if is_for(device, name) => usable(backend, plan)?,
                    DeviceArgument::Cpu => {
                        bail!("back end `{name}` is for tensors on GPUs: add --device cuda")
                    }
                    DeviceArgument::Cuda => {
                        bail!("back end `{name}` is for tensors on the CPU: leave out --device")
                    }
                }
                names.push(name.clone());
            }
        }
    }
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    Ok((names, left_out))
}

/// Why nothing can be measured.
fn reasons(failures: &[Failure]) -> String {
    if failures.is_empty() {
        let compiled: Vec<_> = COMPILED.iter().map(|backend| backend.name()).collect();
        return format!("this build has none for tensors on GPUs, only {}", compiled.join(", "));
    }
    let reasons: Vec<_> = failures.iter().map(|failure| failure.reason.as_str()).collect();
    reasons.join("; ")
}

/// Whether a back end takes tensors that lie there.
fn is_for(device: DeviceArgument, name: &str) -> bool {
    (device == DeviceArgument::Cpu) == (name == HOST)
}

/// Whether a back end can do what is planned, as far as can be said without connecting it.
fn usable(backend: &dyn Backend, plan: &Plan) -> Result<()> {
    let topology = Topology {
        world_size: plan.world,
        placement: Placement::Threads,
        on_devices: backend.name() != HOST,
    };
    let limits = backend.probe(&topology)?;
    ensure!(
        plan.mode == ModeArgument::Eager || limits.graph_capture,
        "back end `{}` cannot be captured in a graph: use --mode eager",
        backend.name()
    );
    Ok(())
}

fn measure(plan: &Plan, backend: &str, devices: Option<&Devices>, quiet: bool) -> Outcome {
    let inputs = Arc::new(Inputs::new(plan.world));
    let mut bar = StepsBar::new("all-reduces", plan.cases.len(), quiet);
    let place = |rank| match devices {
        None => host::place(rank, plan.cases[0].dtype, inputs.clone()),
        Some(devices) => devices.place(rank, plan, inputs.clone()),
    };
    let outcome = measurement::measure(plan, backend, place, || bar.step());
    bar.finish();
    outcome
}
