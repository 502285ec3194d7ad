//! Installing nvcc from the wheels that NVIDIA publishes on PyPI, into a folder of cargo's target
//! folder. Nothing of the system is changed, and deleting the target folder removes it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Error, Result, bail};

use crate::cuda::nvcc::{IN_WHEELS, Nvcc};

/// The wheels of one CUDA release. All are pinned: nvcc asks for the others without a version, and
/// of two releases its headers say that they do not fit.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// What to do where the wheels cannot be had.
const OTHERWISE: &str = "or set PACELINE_NVCC to an nvcc of CUDA 12.8 or newer";

/// Installs nvcc into the folder, which does not hold one yet.
pub(super) fn install(folder: &Path) -> Result<Nvcc> {
    check_pip(Path::new("python3"))?;
    println!("no nvcc found; installing {} and 4 more wheels (105 MB) from PyPI", WHEELS[0]);
    // A folder that is there is complete: pip works beside it, and the rename comes last.
    let partial = folder.with_extension("partial");
    for old in [&partial, folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    // One command: the wheels share a folder, and a second pip would delete what the first put
    // there. `--no-deps` keeps pip from adding wheels of another release.
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"])
        .args(["--root-user-action=ignore", "--target"])
        .arg(&partial)
        .args(WHEELS)
        .status()
        .context("cannot start python3")?;
    if !status.success() {
        bail!(
            "pip could not install nvcc ({status}); is there a network, and are the wheels made \
             for this machine? Try again, {OTHERWISE}"
        );
    }
    // nvcc's profile searches lib64, the wheels have lib.
    let home = partial.join("nvidia/cu13");
    let lib64 = home.join("lib64");
    symlink("lib", &lib64).with_context(|| format!("cannot make {}", lib64.display()))?;
    fs::rename(&partial, folder).with_context(|| format!("cannot rename {}", partial.display()))?;
    Nvcc::at(folder.join(IN_WHEELS)).map_err(Error::msg)
}

/// Fails with the next step where Python or pip is missing.
fn check_pip(python: &Path) -> Result<()> {
    let output = Command::new(python).args(["-m", "pip", "--version"]).output();
    match output {
        Err(error) => bail!(
            "no nvcc, and no {} to install one with ({error}): install Python 3 with pip, \
             {OTHERWISE}",
            python.display()
        ),
        Ok(output) if !output.status.success() => bail!(
            "no nvcc, and {} has no pip to install one with: install pip (Debian: python3-pip), \
             {OTHERWISE}",
            python.display()
        ),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned() {
        for wheel in WHEELS {
            let (name, version) = wheel.split_once("==").expect("the wheel is pinned");
            assert!(name.starts_with("nvidia-") && version.starts_with("13.0."), "{wheel}");
        }
    }

    #[test]
    fn what_is_missing_is_told_with_the_next_step() {
        let error = check_pip(Path::new("/no/such/python")).expect_err("there is no such python");
        let text = error.to_string();
        assert!(text.contains("/no/such/python") && text.contains("PACELINE_NVCC"), "{text}");
        // `false` stands for a Python whose pip does not start.
        let error = check_pip(Path::new("false")).expect_err("it ends with failure");
        assert!(error.to_string().contains("python3-pip"), "{error}");
    }
}
