//! `paceline chat` on a terminal: a pseudo-terminal, keys and what appears on the screen.

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Child, Command},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

/// Nothing that is waited for takes longer, on whatever machine.
const LIMIT: Duration = Duration::from_secs(120);

const CTRL_C: &[u8] = b"\x03";
const CTRL_D: &[u8] = b"\x04";
const UP: &[u8] = b"\x1b[A";

/// A program on a terminal of its own.
struct Terminal {
    keys: File,
    screen: Receiver<Vec<u8>>,
    /// What appeared and was not waited for yet.
    seen: Vec<u8>,
    child: Child,
}

impl Terminal {
    fn start(state: &Path, arguments: &[&str]) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let line = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let line: OwnedFd = line.into();
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command
            .arg("chat")
            .args(arguments)
            .env("TERM", "xterm")
            .env("XDG_STATE_HOME", state)
            .stdin(line.try_clone().unwrap())
            .stdout(line.try_clone().unwrap())
            .stderr(line);
        // SAFETY: between fork and exec only two system calls are made; nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(std::io::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The command holds the terminal's other end, which must close with the program.
        drop(command);
        let (sender, screen) = channel();
        let mut output: File = keys.as_fd().try_clone_to_owned().unwrap().into();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails when the program has ended.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { keys: keys.into(), screen, seen: Vec::new(), child }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    fn enter(&mut self, text: &str) {
        self.press(text.as_bytes());
        self.press(b"\r");
    }

    /// Waits until something appears after what was waited for before. Returns what came between.
    fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let found = self.seen.windows(text.len()).position(|bytes| bytes == text.as_bytes());
            if let Some(start) = found {
                let before = String::from_utf8_lossy(&self.seen[..start]).into_owned();
                self.seen.drain(..start + text.len());
                return before;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.seen.extend(bytes),
                Err(error) => {
                    panic!("{error}: no {text:?} in {:?}", String::from_utf8_lossy(&self.seen))
                }
            }
        }
    }

    /// Waits for the prompt, which is shown when the terminal is ready for keys.
    fn wait_for_prompt(&mut self) {
        self.wait_for("> ");
    }

    /// Waits for the end; true for success.
    fn end(mut self) -> bool {
        let deadline = Instant::now() + LIMIT;
        // The screen ends when the program has.
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.seen.extend(bytes),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("{error}: {:?}", String::from_utf8_lossy(&self.seen)),
            }
        }
        self.child.wait().unwrap().success()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The demo model with room for answers that take minutes.
fn endless_model(folder: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/demo/stories-moe");
    for entry in std::fs::read_dir(demo).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = 100_000.into();
    std::fs::write(&path, config.to_string()).unwrap();
}

/// A message of the reference, and how its answer begins.
fn known(index: usize) -> (String, String) {
    let reference: Value =
        serde_json::from_str(include_str!("../../testdata/stories-moe.json")).unwrap();
    let prompt = &reference["prompts"][index];
    let message = prompt["messages"][0]["content"].as_str().unwrap().to_owned();
    let answer = prompt["greedy_text"].as_str().unwrap();
    (message, answer.chars().take(20).collect())
}

/// Ctrl-C stops an answer that would take minutes; the program, and its other ranks, go on.
fn ctrl_c_stops_the_answer(ranks: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    endless_model(folder.path());
    let state = tempfile::tempdir().unwrap();
    let model = ["--model", folder.path().to_str().unwrap(), "--context", "60000"];
    let endless = ["--ignore-eos", "--max-tokens", "60000"];
    let mut terminal = Terminal::start(state.path(), &[&model[..], &endless, ranks].concat());
    for (index, name) in [(3, "one.json"), (2, "two.json")] {
        let (message, beginning) = known(index);
        terminal.wait_for_prompt();
        terminal.enter(&message);
        terminal.wait_for(&beginning);
        terminal.press(CTRL_C);
        terminal.wait_for("[stopped]");
        terminal.wait_for_prompt();
        let file = state.path().join(name);
        terminal.enter(&format!("/save {}", file.display()));
        terminal.wait_for("saved to");
        let record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let answer = &record["messages"][1];
        assert_eq!(answer["stopped"], true);
        assert!(answer["content"].as_str().unwrap().starts_with(&beginning), "{answer}");
        terminal.wait_for_prompt();
        terminal.enter("/clear");
    }
    terminal.wait_for_prompt();
    terminal.press(CTRL_C);
    terminal.wait_for("Ctrl-D");
    terminal.wait_for_prompt();
    terminal.press(CTRL_D);
    assert!(terminal.end());
}

#[test]
fn ctrl_c_stops_the_answer_of_one_rank() {
    ctrl_c_stops_the_answer(&[]);
}

#[test]
fn ctrl_c_stops_the_answer_of_ranks_that_are_threads() {
    ctrl_c_stops_the_answer(&["--tp", "2"]);
}

#[test]
fn ctrl_c_stops_the_answer_of_ranks_that_are_processes() {
    ctrl_c_stops_the_answer(&["--tp", "2", "--processes"]);
}

/// What was typed can be had again with the arrow keys, in the next run too.
#[test]
fn the_history_outlives_the_program() {
    let state = tempfile::tempdir().unwrap();
    let (message, beginning) = known(3);
    let arguments = ["--max-tokens", "16", "--quiet"];
    let mut terminal = Terminal::start(state.path(), &arguments);
    terminal.wait_for_prompt();
    terminal.enter(&message);
    terminal.wait_for(&beginning);
    terminal.wait_for_prompt();
    terminal.enter("/exit");
    assert!(terminal.end());
    assert!(state.path().join("paceline/history").is_file());
    let mut terminal = Terminal::start(state.path(), &arguments);
    terminal.wait_for_prompt();
    terminal.press(UP);
    terminal.wait_for("/exit");
    terminal.press(UP);
    terminal.wait_for(&message);
    terminal.press(b"\r");
    terminal.wait_for(&beginning);
    terminal.wait_for_prompt();
    terminal.press(CTRL_D);
    assert!(terminal.end());
}

/// A history that cannot be kept is a warning; a mistake is a line, and the next turn can come.
#[test]
fn small_troubles_do_not_end_a_conversation() {
    let (message, beginning) = known(3);
    let state = Path::new("/dev/null/state");
    let mut terminal = Terminal::start(state, &["--max-tokens", "16", "--context", "256"]);
    terminal.wait_for("/help lists the commands");
    terminal.wait_for_prompt();
    terminal.enter("/nonsense");
    terminal.wait_for("cannot keep the history in /dev/null/state/paceline/history");
    terminal.wait_for("there is no command /nonsense");
    terminal.wait_for_prompt();
    terminal.enter(&"word ".repeat(400));
    terminal.wait_for("--context");
    terminal.wait_for_prompt();
    // "Müller" in Latin-1: no line, also not in part.
    terminal.press(b"M\xfcller\r");
    terminal.wait_for("not UTF-8");
    terminal.wait_for_prompt();
    terminal.enter("/help");
    terminal.wait_for("/retry");
    terminal.wait_for_prompt();
    // Of two lines.
    let (first, second) = message.split_once(' ').unwrap();
    terminal.enter(&format!("{first}\\"));
    terminal.wait_for("… ");
    terminal.press(CTRL_C);
    terminal.wait_for_prompt();
    terminal.enter(&format!("{first} {second}"));
    terminal.wait_for(&beginning);
    terminal.wait_for("tok/s");
    terminal.wait_for_prompt();
    terminal.enter("/retry");
    terminal.wait_for(&beginning);
    terminal.wait_for_prompt();
    terminal.press(CTRL_D);
    assert!(terminal.end());
}

/// What a turn of `chat --json` saw and said.
fn turn(terminal: &mut Terminal) -> Value {
    terminal.wait_for("\n{");
    let object = format!("{{{}}}", terminal.wait_for("}\r\n"));
    terminal.wait_for_prompt();
    serde_json::from_str(&object).unwrap()
}

/// Issue 3: a turn that cannot be leaves no trace. The model still sees what was said before an
/// over-long message, and an answer that /retry could not replace stays.
#[test]
fn refused_turns_leave_the_conversation_as_it_was() {
    let state = tempfile::tempdir().unwrap();
    let arguments = ["--max-tokens", "8", "--context", "256", "--json", "--quiet"];
    let mut terminal = Terminal::start(state.path(), &arguments);
    terminal.wait_for_prompt();
    terminal.enter("Hi");
    let first = turn(&mut terminal);
    terminal.enter(&"word ".repeat(400));
    terminal.wait_for("--context");
    terminal.wait_for_prompt();
    terminal.enter("And at night?");
    let second = turn(&mut terminal);
    assert_eq!(second["dropped_turns"], 0);
    let ids = |turn: &Value| turn["prompt_ids"].as_array().unwrap().clone();
    assert!(ids(&second).starts_with(&ids(&first)), "{second}");

    let save = |terminal: &mut Terminal, name: &str| -> Value {
        let file = state.path().join(name);
        terminal.enter(&format!("/save {}", file.display()));
        terminal.wait_for("saved to");
        terminal.wait_for_prompt();
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap()
    };
    let before = save(&mut terminal, "before.json");
    assert_eq!(before["messages"].as_array().unwrap().len(), 4);
    terminal.enter(&format!("/system {}", "word ".repeat(400)));
    terminal.wait_for("the system message is set");
    terminal.wait_for_prompt();
    terminal.enter("/retry");
    terminal.wait_for("--context");
    terminal.wait_for_prompt();
    terminal.enter("/system");
    terminal.wait_for("no system message");
    terminal.wait_for_prompt();
    assert_eq!(save(&mut terminal, "after.json"), before);
    terminal.press(CTRL_D);
    assert!(terminal.end());
}
