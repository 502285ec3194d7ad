//! Prompts and template arguments that are no text, no JSON or nothing that a template can use.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use serde_json::json;

use crate::{demo, message, paceline, refused, refused_model};

/// Latin-1, an overlong form, a surrogate, an unfinished character, a byte that never occurs.
const NOT_UTF8: [&[u8]; 5] = [b"caf\xe9", b"\xc0\xaf", b"\xed\xa0\x80", b"a\xf0\x9f", b"\xff"];

#[test]
fn prompts_that_are_no_utf8_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompt");
    for bytes in NOT_UTF8 {
        fs::write(&file, bytes).unwrap();
        refused(&[OsStr::new("generate"), file.as_os_str()], &["UTF-8", file.to_str().unwrap()]);
        let argument = OsStr::from_bytes(bytes);
        for option in ["--prompt", "--chat"] {
            refused(&[OsStr::new("generate"), OsStr::new(option), argument], &["UTF-8"]);
        }
        for more in [&[][..], &["-"], &["--chat"]] {
            let mut child = paceline(&[&["generate"], more].concat())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(bytes).unwrap();
            let text = message(&child.wait_with_output().unwrap());
            assert!(text.contains("standard input is not UTF-8"), "{text}");
        }
    }
    refused(&["generate", directory.path().to_str().unwrap()], &["directory"]);
}

#[test]
fn wrong_template_arguments_are_named() {
    let chat = ["generate", "--chat", "x", "--max-tokens", "1", "--template-arg"];
    let deep = format!("a={}", "[".repeat(100_000));
    for (argument, part) in [
        ("thinking", "NAME=JSON"),
        ("thinking=yes", "JSON"),
        ("thinking=", "JSON"),
        ("thinking={\"a\":}", "JSON"),
        ("thinking=1e999", "JSON"),
        (&deep, "JSON"),
        ("messages=7", "template"),
        ("messages=[{}]", "template"),
    ] {
        let arguments = [&chat[..], &[argument]].concat();
        let text = String::from_utf8_lossy(&paceline(&arguments).output().unwrap().stderr)
            .chars()
            .rev()
            .take(1000)
            .collect::<String>();
        let text: String = text.chars().rev().collect();
        assert!(text.contains(part) && !text.contains("panicked"), "{argument}: {text}");
    }
    refused(&["generate", "--prompt", "x", "--template-arg", "a=1"], &["--chat"]);
}

/// Templates that loop, recurse, grow, refuse or are no templates.
#[test]
fn hostile_templates_end_in_an_error() {
    let directory = demo();
    let path = directory.path().join("chat_template.jinja");
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}";
    let ends = "{% endfor %}{% endfor %}";
    let name = path.to_str().unwrap();
    for (template, parts) in [
        (format!("{loops}{ends}"), &[name, "fuel"][..]),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(), &[name, "recursion"]),
        (format!("{loops}{{{{ 'x' * 1000 }}}}{ends}"), &[name, "fuel"]),
        ("{{ 'x' * 10000000000 }}".to_owned(), &[name, "fuel"]),
        ("{{ raise_exception('no such role') }}".to_owned(), &["refuses", "no such role"]),
        ("\n\n{% if %}".to_owned(), &[name, ":3"]),
        ("{{ messages[0].content.nothing() }}".to_owned(), &[name, "nothing"]),
        ("{% include '/etc/passwd' %}".to_owned(), &[name]),
        ("x".repeat(2 << 20), &[name, "2097152 bytes"]),
        (String::new(), &["empty"]),
    ] {
        fs::write(&path, template).unwrap();
        refused_model(directory.path(), &["--chat", "x"], parts);
    }
    fs::write(&path, b"{{ bos_token }}\xff").unwrap();
    refused_model(directory.path(), &["--chat", "x"], &[name, "UTF-8"]);
    fs::remove_file(&path).unwrap();
    let config = json!({"chat_template": [{"name": "other", "template": "x"}]});
    fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let parts = ["tokenizer_config.json", "chat_template"];
    refused_model(directory.path(), &["--chat", "x"], &parts);
}
