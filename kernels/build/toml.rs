//! The layout of TOML that this repository's own files use: tables, strings, arrays of strings.
//!
//! This is no TOML parser: it splits a text into statements and reads strings, which is all that
//! the manifests and kernels.toml need, and saves a dependency of every build.

/// The lines without comments, arrays over several lines joined into one, with the number of their
/// first line, counted from 1.
pub(crate) fn statements(text: &str) -> Vec<(usize, String)> {
    let mut statements: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (index, line) in text.lines().enumerate() {
        let line = without_comment(line).trim();
        if line.is_empty() {
            continue;
        }
        match statements.last_mut() {
            Some((_, last)) if open => {
                last.push(' ');
                last.push_str(line);
            }
            _ => statements.push((index + 1, line.to_owned())),
        }
        let last = statements.last().map_or("", |(_, last)| last.as_str());
        open = last.matches('[').count() > last.matches(']').count();
    }
    statements
}

fn without_comment(line: &str) -> &str {
    let mut quoted = false;
    for (at, character) in line.char_indices() {
        match character {
            '"' => quoted = !quoted,
            '#' if !quoted => return &line[..at],
            _ => {}
        }
    }
    line
}

/// Every quoted string of a value.
pub(crate) fn strings(value: &str) -> Vec<String> {
    value.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}
