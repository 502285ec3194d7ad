//! The demo model's weights are most of the binary, hardly compress, and lie in every checkout. So
//! the bundle has zeros in their place, and a script that puts them back from a checkout.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// What puts the weights back, by the list that [`cut_out`] writes.
pub(super) const RESTORE: &str = include_str!("restore-demo.sh");

/// Embedded weights start at a multiple of this, in memory and so in the file.
const ALIGNMENT: usize = 64;

/// Overwrites the embedded weights in a binary with zeros, and lists beside it what was cut out:
/// a line `<offset> <bytes> <file in the checkout>` each.
pub(super) fn cut_out(workspace: &Workspace, binary: &Path, list: &Path) -> Result<()> {
    let cannot_read = || format!("cannot read {}", binary.display());
    let mut program = fs::read(binary).with_context(cannot_read)?;
    let mut lines = String::new();
    for file in workspace.files()? {
        if !file.starts_with("model/demo/") || !file.ends_with(".safetensors") {
            continue;
        }
        let weights =
            fs::read(workspace.root.join(&file)).with_context(|| format!("cannot read {file}"))?;
        if let Some(offset) = cut(&mut program, &weights) {
            lines += &format!("{offset} {} {file}\n", weights.len());
        }
    }
    // Writing keeps the file's permissions.
    fs::write(binary, program).with_context(|| format!("cannot write {}", binary.display()))?;
    fs::write(list, lines).with_context(|| format!("cannot write {}", list.display()))
}

/// Overwrites a part of the program with zeros and returns where it was.
fn cut(program: &mut [u8], part: &[u8]) -> Option<usize> {
    let mut offsets = (0..program.len()).step_by(ALIGNMENT);
    let offset = offsets.find(|&offset| program[offset..].starts_with(part))?;
    program[offset..offset + part.len()].fill(0);
    Some(offset)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_part_is_cut_where_it_starts_aligned() {
        let mut program: Vec<u8> = (0..=255).collect();
        let whole = program.clone();
        assert_eq!(cut(&mut program, &whole[65..80]), None);
        assert_eq!(cut(&mut program, &[9; 10]), None);
        assert_eq!(program, whole);
        assert_eq!(cut(&mut program, &whole[128..150]), Some(128));
        assert_eq!(program[127..151].iter().filter(|byte| **byte == 0).count(), 22);
    }

    #[test]
    fn the_script_puts_back_what_was_cut() {
        let root = std::env::temp_dir().join(format!("paceline-demo-{}", std::process::id()));
        let bundle = root.join("target/bundle");
        fs::create_dir_all(&bundle).expect("the folder can be written");
        let program: Vec<u8> = (0..1000_u32).map(|index| (index * 7 % 251) as u8 + 1).collect();
        let mut without = program.clone();
        let offset = cut(&mut without, &program[192..303]).expect("it is there");
        let write = |path: &Path, bytes: &[u8]| fs::write(path, bytes).expect("it is writable");
        write(&root.join("w"), &program[192..303]);
        write(&bundle.join("paceline"), &without);
        write(&bundle.join("demo.txt"), format!("{offset} 111 w\n").as_bytes());
        write(&bundle.join("restore-demo.sh"), RESTORE.as_bytes());
        let run = |arguments: &[&str]| {
            let mut command = Command::new("bash");
            command.arg(bundle.join("restore-demo.sh")).args(arguments);
            command.output().expect("bash runs").status.success()
        };
        let fails = !run(&["/no/such/checkout"]);
        let succeeds = run(&[]);
        let restored = fs::read(bundle.join("paceline"));
        fs::remove_dir_all(&root).expect("the folder was written");
        assert!(fails && succeeds);
        assert!(without != program);
        assert_eq!(restored.expect("it was written"), program);
    }
}
