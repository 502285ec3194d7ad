//! Speed of the matrix products: medians on one thread and on several.
//!
//! `cargo bench -p paceline-kernels --bench operators --
//! [--quick] [--threads N] [--spread MIB] [--rows N] [NAME…]`
//!
//! A case cycles through weights of 4 MiB together, so that none is in the second-level cache when
//! its turn comes; with a larger `--spread`, none is in any cache. p10, p50 and p90 are percentiles
//! of the time of a call. GMAC/s are 10⁹ products of a weight and an activation a second, GB/s are
//! bytes of weights read, both at p50.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use half::bf16;
use paceline_kernels::{
    DType, Stream, Tensor, Weight,
    ops::{
        linear::linear,
        moe::{Expert, MoeScratch, Routing, moe},
        swiglu::swiglu,
    },
};

struct Options {
    /// Time for each case.
    time: Duration,
    /// Bytes of weights that a case cycles through.
    spread_bytes: usize,
    /// The only number of rows wanted.
    rows: Option<usize>,
    /// Parts of the names of the cases to run; empty: all.
    names: Vec<String>,
}

fn main() {
    let mut options = Options {
        time: Duration::from_millis(400),
        spread_bytes: 4 << 20,
        rows: None,
        names: Vec::new(),
    };
    let mut threads = vec![1, 2];
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => options.time = Duration::from_millis(40),
            "--threads" => threads = vec![number(arguments.next())],
            "--rows" => options.rows = Some(number(arguments.next())),
            "--spread" => options.spread_bytes = number(arguments.next()) << 20,
            // Cargo passes it to every bench program.
            "--bench" => {}
            _ => options.names.push(argument),
        }
    }
    for threads in threads {
        let stream = Stream::host(threads).expect("threads can be started");
        println!("\n{} threads, {}", stream.threads(), stream.isa());
        println!(
            "{:<34} {:>5} {:>9} {:>9} {:>9} {:>8} {:>7}",
            "case", "rows", "us p10", "us p50", "us p90", "GMAC/s", "GB/s"
        );
        stream.run(|| all(&stream, &options));
    }
}

fn number(argument: Option<String>) -> usize {
    argument.and_then(|text| text.parse().ok()).expect("the option takes a number")
}

fn all(stream: &Stream, options: &Options) {
    // The shapes of the demo model: query, latent, output, head; then of larger ones.
    for (outputs, inputs) in [
        (128, 256),
        (384, 128),
        (80, 256),
        (512, 64),
        (256, 256),
        (768, 256),
        (256, 768),
        (4096, 256),
        (2048, 2048),
    ] {
        for format in ["bf16", "int4", "fp8", "f32"] {
            for rows in [1, 2, 3, 5, 8, 16, 512] {
                products(stream, options, format, outputs, inputs, rows);
            }
        }
    }
    for rows in [1, 2, 3, 5, 16, 512] {
        gated(stream, options, rows);
    }
    for rows in [1, 2, 3, 5, 16, 512] {
        mixture(stream, options, rows);
    }
}

fn products(
    stream: &Stream,
    options: &Options,
    format: &str,
    outputs: usize,
    inputs: usize,
    rows: usize,
) {
    let name = format!("linear {format} {outputs} x {inputs}");
    if !options.wants(&name, rows) {
        return;
    }
    let weights = options.spread(|seed| weight(format, outputs, inputs, seed));
    let x = activations(rows, inputs);
    let mut out = Tensor::zeros(DType::F32, &[rows, outputs]);
    let times = measure(options, |round| {
        linear(stream, &x, &weights[round % weights.len()], &mut out);
        black_box(&out);
    });
    report(&name, rows, times, rows * outputs * inputs, weights[0].bytes());
}

fn gated(stream: &Stream, options: &Options, rows: usize) {
    let name = "swiglu bf16 768 x 256";
    if !options.wants(name, rows) {
        return;
    }
    let weights = options.spread(|seed| weight("bf16", 768, 256, seed));
    let x = activations(rows, 256);
    let mut out = Tensor::zeros(DType::F32, &[rows, 768]);
    let times = measure(options, |round| {
        let (gate, up) = (2 * round % weights.len(), (2 * round + 1) % weights.len());
        swiglu(stream, &x, &weights[gate], &weights[up], &mut out);
        black_box(&out);
    });
    report(name, rows, times, rows * 2 * 768 * 256, 2 * weights[0].bytes());
}

/// 4 of 16 experts of 256 × 256, chosen anew in each round.
fn mixture(stream: &Stream, options: &Options, rows: usize) {
    let name = "moe int4 4 of 16, 256 x 256";
    if !options.wants(name, rows) {
        return;
    }
    let expert = |seed| Expert {
        gate: weight("int4", 256, 256, seed),
        up: weight("int4", 256, 256, seed + 1),
        down: weight("int4", 256, 256, seed + 2),
    };
    let bytes = 3 * 16 * weight("int4", 256, 256, 0).bytes();
    let layer_count = (options.spread_bytes / bytes).max(2);
    let layers: Vec<Vec<Expert>> = (0..layer_count as u64)
        .map(|layer| (0..16).map(|index| expert(layer * 64 + index * 3)).collect())
        .collect();
    let x = activations(rows, 256);
    let mut out = Tensor::zeros(DType::F32, &[rows, 256]);
    let mut scratch = MoeScratch::for_rows(rows, 4, 16, 256, 256);
    let mut routing = Routing::with_capacity(rows, 4);
    routing.set_rows(rows);
    let mut state = 1;
    let times = measure(options, |round| {
        for row in 0..rows {
            let first = random(&mut state) as u32;
            for (j, expert) in routing.row_mut(row).0.iter_mut().enumerate() {
                *expert = (first + 5 * j as u32) % 16;
            }
            routing.row_mut(row).1.fill(0.25);
        }
        moe(stream, &x, &layers[round % layer_count], 0, &routing, &mut scratch, &mut out);
        black_box(&out);
    });
    let bytes = layers[0][0].gate.bytes() * 3 * 16.min(4 * rows);
    report(name, rows, times, rows * 4 * 3 * 256 * 256, bytes);
}

impl Options {
    fn wants(&self, name: &str, rows: usize) -> bool {
        self.rows.is_none_or(|wanted| wanted == rows)
            && (self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str())))
    }

    /// As many weights as fill the spread.
    fn spread(&self, make: impl Fn(u64) -> Weight) -> Vec<Weight> {
        let first = make(0);
        let count = (self.spread_bytes / first.bytes()).clamp(2, 2000) / 2 * 2;
        std::iter::once(first).chain((1..count as u64).map(make)).collect()
    }
}

fn random(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f32
}

fn activations(rows: usize, width: usize) -> Tensor {
    let mut state = 7;
    let values: Vec<f32> =
        (0..rows * width).map(|_| random(&mut state) / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_slice(&[rows, width], &values)
}

fn weight(format: &str, outputs: usize, inputs: usize, seed: u64) -> Weight {
    let mut state = seed;
    let mut values = |count: usize| -> Vec<f32> {
        (0..count).map(|_| random(&mut state) / (1 << 23) as f32 - 1.0).collect()
    };
    let weight = match format {
        "bf16" => {
            let values: Vec<_> = values(outputs * inputs).into_iter().map(bf16::from_f32).collect();
            Weight::float(Tensor::from_slice(&[outputs, inputs], &values))
        }
        "f32" => Weight::float(Tensor::from_slice(&[outputs, inputs], &values(outputs * inputs))),
        "int4" => {
            let words: Vec<i32> =
                values(outputs * inputs / 8).into_iter().map(|v| (v * 2e9) as i32).collect();
            let scales: Vec<_> =
                values(outputs * inputs / 32).into_iter().map(bf16::from_f32).collect();
            Weight::int4(
                Tensor::from_slice(&[outputs, inputs / 8], &words),
                Tensor::from_slice(&[outputs, inputs / 32], &scales),
            )
        }
        _ => {
            let codes: Vec<u8> =
                values(outputs * inputs).into_iter().map(|v| (v * 100.0) as i8 as u8).collect();
            let bytes: paceline_kernels::SharedBytes = std::sync::Arc::new(codes);
            let codes = Tensor::from_shared(DType::F8E4M3, &[outputs, inputs], bytes, 0);
            let blocks = [outputs.div_ceil(128), inputs.div_ceil(128)];
            let scale = Tensor::from_slice(&blocks, &values(blocks[0] * blocks[1]));
            Weight::fp8(codes.expect("the codes fill the shape"), scale, [128, 128])
        }
    };
    weight.expect("the parts fit each other")
}

/// Percentiles 10, 50 and 90 of the time of `work`, called again and again for the time of the
/// options. Short work is timed in batches of about 100 µs.
fn measure(options: &Options, mut work: impl FnMut(usize)) -> [Duration; 3] {
    let start = Instant::now();
    let mut rounds = 0;
    while rounds < 3 || start.elapsed() < options.time / 8 {
        work(rounds);
        rounds += 1;
    }
    // Short enough that most batches run without another program in between.
    let batch = (rounds as f64 * 1e-4 / start.elapsed().as_secs_f64()) as usize + 1;
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 3 || start.elapsed() < options.time {
        let batch_start = Instant::now();
        for _ in 0..batch {
            work(rounds);
            rounds += 1;
        }
        times.push(batch_start.elapsed() / batch as u32);
    }
    times.sort();
    [1, 5, 9].map(|tenth| times[times.len() * tenth / 10])
}

fn report(name: &str, rows: usize, times: [Duration; 3], products: usize, bytes: usize) {
    let [p10, p50, p90] = times.map(|time| time.as_secs_f64());
    println!(
        "{name:<34} {rows:>5} {:>9.2} {:>9.2} {:>9.2} {:>8.2} {:>7.2}",
        p10 * 1e6,
        p50 * 1e6,
        p90 * 1e6,
        products as f64 / p50 / 1e9,
        bytes as f64 / p50 / 1e9,
    );
}
