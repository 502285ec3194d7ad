//! World size, rank and address of a process, from its options and its environment.
//!
//! Invariant: an option and a variable that say different things are an error, never a silent
//! choice. Start with [`Settings::resolve`]; it is pure, the environment is an argument.

use std::path::PathBuf;

use crate::{CommError, InitMethod, InitOptions, Rank, Result, Unavailable, group};

/// What a process needs to know to meet the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) world_size: usize,
    pub(crate) rank: Rank,
    pub(crate) local_rank: usize,
    pub(crate) meeting: Meeting,
}

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// A TCP port of rank 0.
    Tcp { host: String, port: u16 },
    /// A file that says where rank 0 listens.
    File(PathBuf),
    /// A Unix socket in the abstract namespace.
    Local { name: String },
}

impl std::fmt::Display for Meeting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => {
                write!(formatter, "tcp://[{host}]:{port}")
            }
            Self::Tcp { host, port } => write!(formatter, "tcp://{host}:{port}"),
            Self::File(path) => write!(formatter, "file://{}", path.display()),
            Self::Local { name } => write!(formatter, "the Unix socket @{name}"),
        }
    }
}

/// Reads a variable of the environment.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The names of one launcher's variables.
struct Launcher {
    world_size: &'static str,
    rank: &'static str,
    local_rank: &'static str,
}

const TORCHRUN: Launcher =
    Launcher { world_size: "WORLD_SIZE", rank: "RANK", local_rank: "LOCAL_RANK" };
const SLURM: Launcher =
    Launcher { world_size: "SLURM_NTASKS", rank: "SLURM_PROCID", local_rank: "SLURM_LOCALID" };

impl Launcher {
    /// Torchrun's variables if it set any of them: it may itself run under Slurm, whose
    /// variables then describe torchrun and not its children.
    fn detect(environment: Environment<'_>) -> Self {
        let has = |name| environment(name).is_some();
        if has(TORCHRUN.world_size) || has(TORCHRUN.rank) || !has(SLURM.rank) {
            TORCHRUN
        } else {
            SLURM
        }
    }
}

impl Settings {
    pub(crate) fn resolve(options: &InitOptions, environment: Environment<'_>) -> Result<Self> {
        let launcher = Launcher::detect(environment);
        let world_size = Setting {
            name: "world size",
            option: "world_size",
            variable: launcher.world_size,
            variables: "WORLD_SIZE (torchrun) or SLURM_NTASKS (srun)",
        };
        let rank = Setting {
            name: "rank",
            option: "rank",
            variable: launcher.rank,
            variables: "RANK (torchrun) or SLURM_PROCID (srun)",
        };
        let local_rank = Setting {
            name: "local rank",
            option: "local_rank",
            variable: launcher.local_rank,
            variables: "LOCAL_RANK (torchrun) or SLURM_LOCALID (srun)",
        };
        let (size, size_origin) = world_size.required(options.world_size, environment)?;
        group::check_world_size(size, &size_origin)?;
        let (index, origin) = rank.required(options.rank, environment)?;
        let below = |setting: &Setting, value: usize, origin: String| {
            if value < size {
                return Ok(value);
            }
            Err(CommError::SettingInvalid {
                setting: setting.name,
                value: value.to_string(),
                origin,
                expected: format!("below the world size, which is {size} (from {size_origin})"),
            })
        };
        let index = below(&rank, index, origin)?;
        let local_rank = match local_rank.find(options.local_rank, environment)? {
            Some((value, origin)) => below(&local_rank, value, origin)?,
            None => index,
        };
        check_one_machine(size, environment)?;
        let meeting = match &options.method {
            InitMethod::Tcp { host, port } => Meeting::Tcp { host: host.clone(), port: *port },
            InitMethod::File(path) => Meeting::File(path.clone()),
            // A single rank meets nobody, and so needs no address.
            InitMethod::Env if size == 1 => Meeting::Local { name: String::new() },
            InitMethod::Env => address(environment)?,
        };
        Ok(Self { world_size: size, rank: Rank(index), local_rank, meeting })
    }
}

struct Setting {
    name: &'static str,
    option: &'static str,
    /// The variable of the launcher that was detected.
    variable: &'static str,
    /// All variables that could give it.
    variables: &'static str,
}

impl Setting {
    fn required(
        &self,
        option: Option<usize>,
        environment: Environment<'_>,
    ) -> Result<(usize, String)> {
        self.find(option, environment)?.ok_or(CommError::SettingMissing {
            setting: self.name,
            option: self.option,
            variables: self.variables,
        })
    }

    /// The value and where it came from.
    fn find(
        &self,
        option: Option<usize>,
        environment: Environment<'_>,
    ) -> Result<Option<(usize, String)>> {
        let found = match environment(self.variable) {
            Some(text) => {
                Some(text.trim().parse::<usize>().map_err(|_| CommError::SettingInvalid {
                    setting: self.name,
                    value: text,
                    origin: self.variable.to_owned(),
                    expected: "a whole number".to_owned(),
                })?)
            }
            None => None,
        };
        match (option, found) {
            (Some(given), Some(found)) if given != found => Err(CommError::SettingContradiction {
                setting: self.name,
                option: self.option,
                given: given.to_string(),
                variable: self.variable,
                found: found.to_string(),
            }),
            (Some(given), _) => Ok(Some((given, format!("the option `{}`", self.option)))),
            (None, Some(found)) => Ok(Some((found, self.variable.to_owned()))),
            (None, None) => Ok(None),
        }
    }
}

/// Torchrun says how many of its ranks are on this machine: all of them must be.
fn check_one_machine(world_size: usize, environment: Environment<'_>) -> Result<()> {
    let Some(text) = environment("LOCAL_WORLD_SIZE") else { return Ok(()) };
    match text.trim().parse::<usize>() {
        Ok(local) if local == world_size => Ok(()),
        Ok(local) if local > 0 && local < world_size => Err(Unavailable::NotPossible {
            name: "host",
            why: format!(
                "its ranks meet in the memory of one machine, but LOCAL_WORLD_SIZE says that \
                 {local} of {world_size} ranks are on this one"
            ),
            next_step: "start all ranks on one machine".to_owned(),
        }
        .into()),
        _ => Err(CommError::SettingInvalid {
            setting: "local world size",
            value: text,
            origin: "LOCAL_WORLD_SIZE".to_owned(),
            expected: format!("from 1 to the world size, which is {world_size}"),
        }),
    }
}

/// Rank 0's address by the environment.
fn address(environment: Environment<'_>) -> Result<Meeting> {
    let missing = |variables| CommError::SettingMissing {
        setting: "rank 0's address",
        option: "method tcp://host:port",
        variables,
    };
    if let (None, None, Some(meeting)) =
        (environment("MASTER_ADDR"), environment("MASTER_PORT"), slurm_step(environment))
    {
        return Ok(meeting);
    }
    let host = environment("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR and MASTER_PORT"))?;
    let text = environment("MASTER_PORT").ok_or_else(|| missing("MASTER_PORT"))?;
    let port = match text.trim().parse::<u16>() {
        Ok(port) if port != 0 => port,
        _ => {
            return Err(CommError::SettingInvalid {
                setting: "rank 0's port",
                value: text,
                origin: "MASTER_PORT".to_owned(),
                expected: "a port from 1 to 65535".to_owned(),
            });
        }
    };
    // Torchrun's agent then listens on that port itself, for its own store, and outlives
    // restarts of the ranks. The run and the restart name a place that no other run has.
    if environment("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text == "True") {
        let part = |name| environment(name).unwrap_or_default();
        let (run, restart) = (part("TORCHELASTIC_RUN_ID"), part("TORCHELASTIC_RESTART_COUNT"));
        let user = rustix::process::getuid().as_raw();
        let hash = fnv1a(format!("{host} {port} {run} {restart} {user}").as_bytes());
        return Ok(Meeting::Local { name: format!("paceline-{hash:016x}") });
    }
    Ok(Meeting::Tcp { host, port })
}

/// srun names no address, but on one machine its job and step name a place that no other run has.
fn slurm_step(environment: Environment<'_>) -> Option<Meeting> {
    let (job, step) = (environment("SLURM_JOB_ID")?, environment("SLURM_STEP_ID")?);
    let nodes = environment("SLURM_STEP_NUM_NODES").or_else(|| environment("SLURM_NNODES"))?;
    let user = rustix::process::getuid().as_raw();
    let hash = fnv1a(format!("slurm {job} {step} {user}").as_bytes());
    (nodes.trim() == "1").then(|| Meeting::Local { name: format!("paceline-{hash:016x}") })
}

/// The 64-bit FNV-1a hash, which is the same in every build.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(options: &InitOptions, variables: &[(&str, &str)]) -> Result<Settings> {
        Settings::resolve(options, &|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn env() -> InitOptions {
        InitOptions::new(InitMethod::Env)
    }

    const TORCH: [(&str, &str); 6] = [
        ("WORLD_SIZE", "4"),
        ("RANK", "3"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn torchrun_is_understood() {
        let settings = resolve(&env(), &TORCH).unwrap();
        assert_eq!((settings.world_size, settings.rank, settings.local_rank), (4, Rank(3), 2));
        assert_eq!(settings.meeting.to_string(), "tcp://node:29500");
    }

    #[test]
    fn torchrun_under_slurm_wins() {
        let slurm = [("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
        let both: Vec<_> = slurm.iter().chain(&TORCH).copied().collect();
        assert_eq!(resolve(&env(), &both), resolve(&env(), &TORCH));
    }

    #[test]
    fn torchruns_own_store_keeps_its_port() {
        let with = |restart| {
            let store = [
                ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ("TORCHELASTIC_RUN_ID", "none"),
                ("TORCHELASTIC_RESTART_COUNT", restart),
            ];
            let variables: Vec<_> = TORCH.iter().chain(&store).copied().collect();
            resolve(&env(), &variables).unwrap().meeting
        };
        assert!(matches!(with("0"), Meeting::Local { .. }));
        assert_eq!(with("0"), with("0"));
        assert_ne!(with("0"), with("1"));
    }

    #[test]
    fn srun_is_understood_and_needs_an_address_on_several_machines() {
        let slurm = [("SLURM_NTASKS", "8"), ("SLURM_PROCID", "5"), ("SLURM_LOCALID", "5")];
        let step = |step, nodes| {
            let step = [("SLURM_JOB_ID", "9"), ("SLURM_STEP_ID", step), ("SLURM_NNODES", nodes)];
            let variables: Vec<_> = slurm.iter().chain(&step).copied().collect();
            resolve(&env(), &variables).map(|settings| settings.meeting)
        };
        assert!(matches!(step("0", "1"), Ok(Meeting::Local { .. })));
        assert_eq!(step("0", "1").ok(), step("0", "1").ok());
        assert_ne!(step("0", "1").ok(), step("1", "1").ok());
        assert!(step("0", "2").unwrap_err().to_string().contains("MASTER_ADDR"));
        let error = resolve(&env(), &slurm).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("MASTER_ADDR") && text.contains("tcp://host:port"), "{text}");
        let method = InitMethod::parse("tcp://node:7").unwrap();
        let settings = resolve(&InitOptions { method, ..env() }, &slurm).unwrap();
        assert_eq!((settings.world_size, settings.rank, settings.local_rank), (8, Rank(5), 5));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (variable, option) in
            [("WORLD_SIZE", "world_size"), ("RANK", "rank"), ("MASTER_ADDR", "method")]
        {
            let rest: Vec<_> = TORCH.into_iter().filter(|(name, _)| *name != variable).collect();
            let error = resolve(&env(), &rest).unwrap_err();
            assert!(matches!(error, CommError::SettingMissing { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(variable) && text.contains(option), "{text}");
        }
        let rest: Vec<_> = TORCH.into_iter().filter(|(name, _)| *name != "MASTER_PORT").collect();
        let text = resolve(&env(), &rest).unwrap_err().to_string();
        assert!(text.contains("MASTER_PORT") && !text.contains("MASTER_ADDR"), "{text}");
    }

    #[test]
    fn contradictions_name_both_sides() {
        for (options, variable) in [
            (InitOptions { world_size: Some(2), ..env() }, "WORLD_SIZE"),
            (InitOptions { rank: Some(1), ..env() }, "RANK"),
            (InitOptions { local_rank: Some(0), ..env() }, "LOCAL_RANK"),
        ] {
            let error = resolve(&options, &TORCH).unwrap_err();
            let CommError::SettingContradiction { option, .. } = error else { panic!("{error}") };
            let text = error.to_string();
            assert!(text.contains(variable) && text.contains(option), "{text}");
        }
        let same = InitOptions { world_size: Some(4), rank: Some(3), ..env() };
        assert!(resolve(&same, &TORCH).is_ok());
    }

    #[test]
    fn impossible_values_say_where_they_came_from() {
        let changed = |variable: &'static str, value: &'static str| {
            let mut variables = TORCH;
            variables.iter_mut().filter(|(name, _)| *name == variable).for_each(|v| v.1 = value);
            resolve(&env(), &variables).unwrap_err()
        };
        for (variable, value) in [
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "four"),
            ("WORLD_SIZE", "65"),
            ("RANK", "4"),
            ("RANK", "-1"),
            ("LOCAL_RANK", "9"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "99999"),
            ("LOCAL_WORLD_SIZE", "5"),
        ] {
            let error = changed(variable, value);
            let CommError::SettingInvalid { origin, value: found, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((origin.as_str(), found.as_str()), (variable, value));
        }
        let error = changed("LOCAL_WORLD_SIZE", "2");
        assert!(matches!(error, CommError::Unavailable(Unavailable::NotPossible { .. })));
    }

    #[test]
    fn one_rank_needs_no_address() {
        let options = InitOptions { world_size: Some(1), rank: Some(0), ..env() };
        assert_eq!(resolve(&options, &[]).unwrap().world_size, 1);
    }
}
