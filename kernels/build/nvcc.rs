//! Finding nvcc, and which targets its version knows.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Result;
use super::compile::Job;
use super::sources::Target;

/// The variables that say where nvcc is, in the order in which they are asked: the program, then
/// the folders that hold `bin/nvcc`.
pub(crate) const VARIABLES: [&str; 3] = ["PACELINE_NVCC", "CUDA_HOME", "CUDA_PATH"];

/// Where the wheels of PyPI put nvcc, below the folder that pip installs into.
pub(crate) const IN_WHEELS: &str = "nvidia/cu13/bin/nvcc";

/// A compiler that runs.
#[derive(Debug)]
pub(crate) struct Nvcc {
    /// The program.
    pub(crate) path: PathBuf,
    /// Major and minor version of CUDA.
    pub(crate) version: (u32, u32),
}

impl Nvcc {
    /// The first nvcc of the search order; `Ok(None)` if there is none. `installed` is the folder
    /// of an nvcc that `cargo xtask kernels` installed.
    ///
    /// An nvcc that `PACELINE_NVCC` names but that is missing, or one that is found but does not
    /// run, is an error: a search that went on would take another one than the user means.
    pub(crate) fn find(installed: Option<&Path>) -> Result<Option<Self>> {
        if let Some(named) = env::var_os(VARIABLES[0]).filter(|named| !named.is_empty()) {
            return Self::at(PathBuf::from(named)).map(Some);
        }
        let places = places(|name| env::var_os(name), installed);
        places.into_iter().find(|path| path.is_file()).map(Self::at).transpose()
    }

    /// The nvcc of a path.
    pub(crate) fn at(path: PathBuf) -> Result<Self> {
        let output = Command::new(&path).arg("--version").output().map_err(|error| {
            format!(
                "cannot run {} ({error}): correct PACELINE_NVCC, CUDA_HOME or PATH",
                path.display()
            )
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        match version(&text) {
            Some(version) if output.status.success() => Ok(Self { path, version }),
            _ => Err(format!(
                "`{} --version` ended with {} and named no release; is it nvcc?",
                path.display(),
                output.status
            )),
        }
    }

    /// The plan without the targets that this version does not know, and those targets.
    pub(crate) fn supported<'a>(&self, plan: Vec<Job<'a>>) -> (Vec<Job<'a>>, Vec<Target>) {
        let mut supported = Vec::new();
        let mut left_out: Vec<Target> = Vec::new();
        for (source, targets) in plan {
            let (known, unknown) = self.known(targets);
            if !known.is_empty() {
                supported.push((source, known));
            }
            for target in unknown {
                if !left_out.contains(&target) {
                    left_out.push(target);
                }
            }
        }
        (supported, left_out)
    }

    fn known(&self, targets: Vec<Target>) -> (Vec<Target>, Vec<Target>) {
        targets.into_iter().partition(|target| first_version(target) <= self.version)
    }

    /// Says that this nvcc is too old for these targets.
    pub(crate) fn too_old(&self, targets: &[Target]) -> String {
        let names: Vec<&str> = targets.iter().map(Target::name).collect();
        let needed = targets.iter().map(first_version).max().unwrap_or_default();
        format!(
            "nvcc {}.{} ({}) is too old for {}: they need CUDA {}.{}",
            self.version.0,
            self.version.1,
            self.path.display(),
            names.join(", "),
            needed.0,
            needed.1
        )
    }
}

/// Where nvcc may be, best first, given the environment.
fn places(variable: impl Fn(&str) -> Option<OsString>, installed: Option<&Path>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for name in &VARIABLES[1..] {
        let home = variable(name).filter(|home| !home.is_empty());
        folders.extend(home.map(|home| PathBuf::from(home).join("bin")));
    }
    folders.extend(variable("PATH").iter().flat_map(env::split_paths));
    folders.push(PathBuf::from("/usr/local/cuda/bin"));
    let mut places: Vec<PathBuf> = folders.into_iter().map(|folder| folder.join("nvcc")).collect();
    places.extend(installed.map(|folder| folder.join(IN_WHEELS)));
    places
}

/// Reads `Cuda compilation tools, release 13.0, V13.0.88`.
fn version(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("release ")?;
    let (major, minor) = rest.split(',').next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The first CUDA that knows a target, by NVIDIA's release notes of these versions. A target that
/// this table does not name is left to nvcc to refuse.
fn first_version(target: &Target) -> (u32, u32) {
    match target.architecture() {
        "86" => (11, 1),
        "89" | "90" => (11, 8),
        "90a" => (12, 0),
        "100" | "100a" | "120" | "120a" => (12, 8),
        "103" | "103a" | "121" | "121a" | "100f" | "103f" | "120f" | "121f" => (12, 9),
        _ => (11, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(names: &[&str]) -> Vec<Target> {
        names.iter().map(|name| Target::parse(name).expect("the name is right")).collect()
    }

    #[test]
    fn places_are_asked_in_order() {
        let environment = |name: &str| match name {
            "CUDA_HOME" => Some(OsString::from("/home-cuda")),
            "CUDA_PATH" => Some(OsString::new()),
            "PATH" => Some(OsString::from("/one:/two")),
            _ => None,
        };
        let places = places(environment, Some(Path::new("/target/cuda")));
        let expected = [
            "/home-cuda/bin/nvcc",
            "/one/nvcc",
            "/two/nvcc",
            "/usr/local/cuda/bin/nvcc",
            "/target/cuda/nvidia/cu13/bin/nvcc",
        ];
        assert_eq!(places, expected.map(PathBuf::from));
    }

    #[test]
    fn the_version_is_read() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\n\
                    Cuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(version(text), Some((13, 0)));
        assert_eq!(version("gcc (Debian 12.2.0-14) 12.2.0"), None);
    }

    #[test]
    fn an_old_nvcc_names_what_it_cannot_compile() {
        let nvcc = Nvcc { path: PathBuf::from("/old/nvcc"), version: (12, 4) };
        let all = targets(&["sm_80", "sm_90a", "sm_100", "compute_120", "sm_100f"]);
        let (known, unknown) = nvcc.known(all.clone());
        assert_eq!(known, targets(&["sm_80", "sm_90a"]));
        assert_eq!(unknown, targets(&["sm_100", "compute_120", "sm_100f"]));
        let expected = "nvcc 12.4 (/old/nvcc) is too old for sm_100, compute_120, sm_100f: \
                        they need CUDA 12.9";
        assert_eq!(nvcc.too_old(&unknown), expected);
        let new = Nvcc { path: PathBuf::from("nvcc"), version: (12, 9) };
        assert_eq!(new.known(all).1, []);
    }

    #[test]
    fn an_nvcc_that_is_not_there_is_named() {
        let error = Nvcc::at(PathBuf::from("/no/such/nvcc")).expect_err("it is not there");
        assert!(error.contains("/no/such/nvcc") && error.contains("PACELINE_NVCC"), "{error}");
    }
}
