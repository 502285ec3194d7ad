//! `paceline bench all-reduce`: that it measures what it says. No time is a pass mark.

use std::process::{Command, Output};

use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
    command.args(["bench", "all-reduce"]).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = run(&[&["--json", "--quiet"], arguments].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap()
}

/// What keeps runs short on few cores.
const SHORT: [&str; 6] = ["--calls", "4", "--repetitions", "3", "--warm-up", "1"];

#[test]
fn every_size_is_measured_in_both_forms_and_right() {
    for (world, dtype, bytes) in [("2", "bf16", 2), ("4", "f16", 2), ("3", "f32", 4)] {
        let ranks = ["--world", world, "--dtype", dtype];
        let report = json(&[&SHORT[..], &ranks, &["--sizes", "1K..64K:8,1228"]].concat());
        let world: f64 = world.parse().unwrap();
        assert_eq!(report["workload"]["world"], world as u64);
        assert_eq!(report["workload"]["mode"], "eager");
        assert!(report["machine"]["processor"].is_string());
        assert!(report["failures"].as_array().unwrap().is_empty());
        let sizes: Vec<(&str, u64)> = rows(&report)
            .iter()
            .map(|row| (row["form"].as_str().unwrap(), row["bytes"].as_u64().unwrap()))
            .collect();
        let of = |form| [1024, 8192, 65536, 1228].map(|size| (form, size));
        assert_eq!(sizes, [of("independent"), of("dependent")].concat());
        for row in rows(&report) {
            assert_eq!(row["wrong"], 0, "{row}");
            assert_eq!((&row["backend"], &row["served_by"]), (&"host".into(), &"host".into()));
            assert_eq!((&row["type"], &row["redop"]), (&dtype.into(), &"sum".into()));
            assert_eq!(row["count"].as_u64().unwrap() * bytes, row["bytes"].as_u64().unwrap());
            let samples = row["seconds"]["samples"].as_array().unwrap();
            assert_eq!(samples.len(), 3);
            assert_eq!(row["producer_seconds"].is_object(), row["form"] == "dependent");
            check_bandwidths(row, world);
        }
    }
}

/// As nccl-tests define them. Where noise hides a dependent call, there are none.
fn check_bandwidths(row: &Value, world: f64) {
    let number = |value: &Value| value.as_f64().unwrap();
    let seconds = number(&row["seconds"]["median"]);
    if seconds <= 0.0 {
        assert!(row["form"] == "dependent" && row["algbw"].is_null(), "{row}");
        return;
    }
    let (algbw, busbw) = (number(&row["algbw"]), number(&row["busbw"]));
    assert!((algbw * seconds * 1e9 / number(&row["bytes"]) - 1.0).abs() < 1e-9, "{row}");
    assert!((busbw / algbw - 2.0 * (world - 1.0) / world).abs() < 1e-9, "{row}");
    let [p10, p90] = ["p10", "p90"].map(|name| number(&row["seconds"][name]));
    assert!(p10 <= seconds && seconds <= p90, "{row}");
}

#[test]
fn rows_of_a_hidden_size_are_sizes_too() {
    let rows_of = ["--rows", "1,3", "--hidden", "7168", "--form", "independent"];
    let report = json(&[&SHORT[..], &rows_of].concat());
    let bytes: Vec<&Value> = rows(&report).iter().map(|row| &row["bytes"]).collect();
    assert_eq!(bytes, [14336, 43008]);
}

/// A call has a buffer of its own, so large calls are fewer; the report says how many.
#[test]
fn calls_of_large_sizes_are_fewer() {
    let arguments = ["--sizes", "16M", "--calls", "9", "--repetitions", "1", "--warm-up", "0"];
    let report = json(&arguments);
    let calls: Vec<&Value> = rows(&report).iter().map(|row| &row["calls"]).collect();
    assert_eq!(calls, [4, 9]);
    assert!(rows(&report).iter().all(|row| row["wrong"] == 0));
}

#[test]
fn the_table_has_the_columns_of_nccl_tests_and_the_plot_is_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let plot_arguments = ["--plot", plot.to_str().unwrap(), "--sizes", "1K,4K", "--world", "4"];
    let output = run(&[&SHORT[..], &plot_arguments, &["--backends", "host,auto"]].concat());
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    for text in ["size (B)", "count", "type", "redop", "time (us)", "algbw", "busbw", "#wrong"] {
        assert!(table.contains(text), "{text}: {table}");
    }
    for text in ["4 ranks", "auto (host)", "fastest, independent: ", "fastest, dependent: "] {
        assert!(table.contains(text), "{text}: {table}");
    }
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(progress.contains("all-reduces"), "{progress}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for text in ["independent calls", "dependent calls", ">1.0 KiB<", ">auto<", ">host<"] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn mistakes_have_clear_answers() {
    let cases: [(&[&str], &str); 10] = [
        (&["--world", "0"], "2..=64"),
        (&["--world", "65"], "2..=64"),
        (&["--backends", "gloo"], "there is no back end `gloo`"),
        (&["--sizes", "4K..1K"], "ends before it begins"),
        (&["--sizes", "1023", "--dtype", "bf16"], "no whole number of bf16"),
        (&["--sizes", "1K", "--rows", "1"], "cannot be used with"),
        (&["--mode", "graph"], "--mode eager"),
        (&["--calls", "0"], "1..=4096"),
        (&["--device", "cuda", "--backends", "host"], "leave out --device"),
        (&["--sizes", "1K", "--calls", "1", "--plot", "/does/not/exist/p.svg"], "/does/not/exist"),
    ];
    for (arguments, expected) in cases {
        let output = run(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
}

/// A machine that has a driver cannot show this.
#[test]
fn without_a_driver_a_gpu_is_refused_with_a_reason() {
    if paceline_kernels::driver::available().is_ok() {
        return;
    }
    let output = run(&["--device", "cuda"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(message.contains("--device cuda: ") && message.contains("NVIDIA"), "{message}");
}
