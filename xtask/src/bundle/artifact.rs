//! The test programs that `cargo test --no-run --message-format=json` names.
//!
//! Cargo prints one JSON object a line. This reads the few strings that matter, without a parser.

use std::path::{Path, PathBuf};

/// A test program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// `<folder of the crate>-<target>`, as in `comm-collectives`.
    pub(super) name: String,
    /// Where cargo put it.
    pub(super) path: PathBuf,
}

/// The test programs among cargo's messages, in their order.
pub(super) fn test_programs(messages: &str) -> Vec<TestProgram> {
    messages.lines().filter_map(test_program).collect()
}

fn test_program(message: &str) -> Option<TestProgram> {
    let is_test = message.contains("\"reason\":\"compiler-artifact\"")
        && message.split_once("\"profile\":{")?.1.split('}').next()?.contains("\"test\":true");
    let path = string(message, "executable").filter(|_| is_test)?;
    let manifest = string(message, "manifest_path")?;
    let folder = Path::new(&manifest).parent()?.file_name()?.to_str()?;
    // The file is called after the target, with a hash of how it was built.
    let file = Path::new(&path).file_name()?.to_str()?;
    let (target, _) = file.rsplit_once('-')?;
    Some(TestProgram { name: format!("{folder}-{target}"), path: PathBuf::from(path) })
}

/// The string of a key; `None` if it has none, or null.
fn string(message: &str, key: &str) -> Option<String> {
    let (_, rest) = message.split_once(&format!("\"{key}\":\""))?;
    let mut text = String::new();
    let mut characters = rest.chars();
    loop {
        match characters.next()? {
            '"' => return Some(text),
            '\\' => text.push(characters.next()?),
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(test: bool, executable: &str) -> String {
        format!(
            "{{\"reason\":\"compiler-artifact\",\"package_id\":\"paceline-comm\",\
             \"manifest_path\":\"/src/comm/Cargo.toml\",\"target\":{{\"kind\":[\"test\"],\
             \"name\":\"collectives\",\"test\":true}},\
             \"profile\":{{\"opt_level\":\"2\",\"test\":{test}}},\
             \"features\":[],\"filenames\":[],\"executable\":{executable},\"fresh\":true}}"
        )
    }

    #[test]
    fn only_test_programs_are_taken() {
        let program = "\"/target/debug/deps/collectives-0123456789abcdef\"";
        let messages = [
            artifact(true, program),
            artifact(false, program),
            artifact(true, "null"),
            "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
        ];
        let expected = TestProgram {
            name: "comm-collectives".to_owned(),
            path: PathBuf::from("/target/debug/deps/collectives-0123456789abcdef"),
        };
        assert_eq!(test_programs(&messages.join("\n")), [expected]);
    }

    #[test]
    fn a_string_may_hold_quotes() {
        assert_eq!(string(r#"{"a":"x \"y\" \\z","b":null}"#, "a").as_deref(), Some(r#"x "y" \z"#));
        assert_eq!(string(r#"{"a":"x","b":null}"#, "b"), None);
        assert_eq!(string(r#"{"a":"never ends"#, "a"), None);
    }
}
