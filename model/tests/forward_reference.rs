//! The target's forward pass against an independent implementation (testdata/stories-moe.json).

use paceline_comm::Communicator;
use paceline_kernels::{DType, Stream};
use paceline_model::{
    config::ModelConfig,
    forward::{KvCache, Model, ModelOptions},
    pass::{AttentionForm, Pass, Segment},
    shard::Parallel,
    weights::{ModelWeights, Source},
};
use serde_json::Value;

const CAPTURE_POINTS: [usize; 3] = [2, 4, 5];

fn reference() -> Value {
    serde_json::from_str(include_str!("../../testdata/stories-moe.json")).unwrap()
}

fn demo(dtype: DType) -> Model {
    let source = Source::DEMO;
    let config = ModelConfig::from_json(&source.config().unwrap()).unwrap();
    let parallel = Parallel { tensor: 1, rank: 0, expert_parallel: false };
    let checkpoint = source.checkpoint().unwrap();
    let weights = ModelWeights::load(&checkpoint, &config, &parallel, &mut |_, _| {}).unwrap();
    let options = ModelOptions {
        dtype,
        rows_max: 640,
        logit_rows_max: 640,
        capture_points: CAPTURE_POINTS.to_vec(),
    };
    let stream = Stream::host(2).unwrap();
    Model::new(config, weights, &parallel, Communicator::alone(), stream, options).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Runs `tokens` after `context` cached ones, all rows with logits.
fn run(
    model: &mut Model,
    cache: &mut KvCache,
    context: usize,
    tokens: &[u32],
    form: AttentionForm,
) -> Vec<f32> {
    let rows = tokens.len();
    let positions: Vec<u32> = (context as u32..).take(rows).collect();
    let slots: Vec<u32> = (0..(context + rows) as u32).collect();
    let logit_rows: Vec<u32> = (0..rows as u32).collect();
    let segment = Segment { first_row: 0, rows, context, earlier: 0, slots: &slots, paths: None };
    let pass =
        Pass { tokens, positions: &positions, segments: &[segment], form, logit_rows: &logit_rows };
    model.forward(&pass, cache).unwrap();
    model.logits().as_slice::<f32>().to_vec()
}

/// Relative distance over the logits that the reference lists.
fn distance(prompt: &Value, logits: &[f32], vocabulary: usize) -> f64 {
    let (mut difference, mut norm) = (0.0f64, 0.0f64);
    for row in prompt["logits"].as_array().unwrap() {
        let position = row["position"].as_u64().unwrap() as usize;
        for pair in row["top"].as_array().unwrap() {
            let id = pair[0].as_u64().unwrap() as usize;
            let expected = pair[1].as_f64().unwrap();
            difference += (f64::from(logits[position * vocabulary + id]) - expected).powi(2);
            norm += expected.powi(2);
        }
    }
    (difference / norm).sqrt()
}

#[test]
fn logits_and_captured_states_equal_the_reference() {
    let mut model = demo(DType::F32);
    let vocabulary = model.config().vocabulary;
    for prompt in reference()["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        let tokens = ids(&prompt["ids"]);
        for form in [AttentionForm::Expanded, AttentionForm::Absorbed] {
            let mut cache = model.cache(tokens.len());
            let logits = run(&mut model, &mut cache, 0, &tokens, form);
            let distance = distance(prompt, &logits, vocabulary);
            println!("{name} {form:?}: relative distance {distance:.1e}");
            assert!(distance < 2e-5, "{name}: {distance}");
            let last = tokens.len() - 1;
            let taps = &model.taps().as_slice::<f32>()[last * 768..];
            for (index, point) in CAPTURE_POINTS.iter().enumerate() {
                let state = &taps[index * 256..(index + 1) * 256];
                let norm = state.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let key = point.to_string();
                let expected = prompt["hidden_norms"][&key].as_f64().unwrap();
                assert!((norm / expected - 1.0).abs() < 1e-4, "{name}: norm at {point}");
                for (got, expected) in state.iter().zip(ids_f64(&prompt["hidden_first4"][&key])) {
                    let close = 1e-3f64.max(1e-3 * expected.abs());
                    assert!((f64::from(*got) - expected).abs() < close, "{name} at {point}");
                }
            }
        }
    }
}

fn ids_f64(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn greedy_continuations_equal_the_reference() {
    let mut model = demo(DType::F32);
    for prompt in reference()["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let expected = ids(&prompt["greedy_ids"]);
        let vocabulary = model.config().vocabulary;
        let mut cache = model.cache(tokens.len() + expected.len());
        let mut logits = run(&mut model, &mut cache, 0, &tokens, AttentionForm::Expanded);
        let mut got = Vec::new();
        for step in 0..expected.len() {
            let row = &logits[logits.len() - vocabulary..];
            let next = (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
            got.push(next);
            let context = tokens.len() + step;
            logits = run(&mut model, &mut cache, context, &[next], AttentionForm::Absorbed);
        }
        assert_eq!(got, expected, "{}", prompt["name"]);
    }
}
