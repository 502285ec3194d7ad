//! Tiny models with hashed weights against published golden values (testdata/tiny.json and the
//! values that the specification of these formats prints): configurations A to D, INT4, FP8,
//! drafts of both kinds, tensor and expert parallelism.

use std::{sync::Arc, thread, time::Duration};

use paceline_comm::{Communicator, GroupOptions, in_process};
use paceline_kernels::{DType, Stream};
use paceline_model::{
    config::ModelConfig,
    eagle3::{
        config::DraftConfig,
        draft::{Draft, DraftPass, DraftStates},
    },
    forward::{KvCache, Model, ModelOptions},
    pass::{AttentionForm, Pass, Segment},
    shard::Parallel,
    synthetic::{Synthetic, TinyDraft, TinyModel},
    weights::{Checkpoint, DraftWeights, ModelWeights},
};
use serde_json::Value;

/// Golden values are printed with five decimals; norms are compared relatively.
const ROUNDED: f32 = 2e-5;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../testdata/tiny.json")).unwrap()
}

fn checkpoint(synthetic: &Synthetic) -> Checkpoint {
    let bytes: &'static [u8] = Vec::leak(synthetic.to_safetensors());
    Checkpoint::from_static("tiny", bytes).unwrap()
}

fn load(tiny: TinyModel, parallel: Parallel, communicator: Communicator) -> Model {
    let synthetic = Synthetic::model(tiny);
    let config = ModelConfig::from_json(&tiny.config().to_string()).unwrap();
    let checkpoint = checkpoint(&synthetic);
    let weights = ModelWeights::load(&checkpoint, &config, &parallel, &mut |_, _| {}).unwrap();
    let options = ModelOptions {
        dtype: DType::F32,
        rows_max: 32,
        logit_rows_max: 32,
        capture_points: (0..=config.layers).collect(),
    };
    let stream = Stream::host(1).unwrap();
    Model::new(config, weights, &parallel, communicator, stream, options).unwrap()
}

fn single(tiny: TinyModel) -> Model {
    load(tiny, Parallel::SINGLE, Communicator::alone())
}

fn run(
    model: &mut Model,
    cache: &mut KvCache,
    context: usize,
    tokens: &[u32],
    form: AttentionForm,
) {
    let rows = tokens.len();
    let positions: Vec<u32> = (context as u32..).take(rows).collect();
    let slots: Vec<u32> = (0..(context + rows) as u32).collect();
    let logit_rows: Vec<u32> = (0..rows as u32).collect();
    let segment = Segment { first_row: 0, rows, context, earlier: 0, slots: &slots, paths: None };
    let pass =
        Pass { tokens, positions: &positions, segments: &[segment], form, logit_rows: &logit_rows };
    model.forward(&pass, cache).unwrap();
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn integers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= ROUNDED, "{what}[{index}]: {got}, not {expected}");
    }
}

/// Compares a model's pass over the golden prompt, and what it says next, with `expected`.
fn check(model: &mut Model, expected: &Value, name: &str) {
    let tokens = integers(&expected["ids"]);
    let vocabulary = model.config().vocabulary;
    for form in [AttentionForm::Expanded, AttentionForm::Absorbed] {
        let mut cache = model.cache(32);
        run(model, &mut cache, 0, &tokens, form);
        let logits = model.logits().as_slice::<f32>().to_vec();
        for (position, first) in expected["logits_first8"].as_object().unwrap() {
            let start = position.parse::<usize>().unwrap() * vocabulary;
            assert_close(&logits[start..start + 8], &floats(first), name);
        }
        let rows = logits.chunks_exact(vocabulary);
        for (row, expected) in rows.clone().zip(floats(&expected["logits_norm"])) {
            assert!((norm(row) / f64::from(expected) - 1.0).abs() < 2e-6, "{name}: norm");
        }
        let choices: Vec<u32> = rows.map(argmax).collect();
        assert_eq!(choices, integers(&expected["argmax"]), "{name} {form:?}");
        let hidden = model.config().hidden;
        let taps = model.taps().as_slice::<f32>();
        let last = &taps[taps.len() - model.taps().width()..];
        let norms = floats(&expected["hidden_norms_last_token"]);
        for (state, expected) in last.chunks_exact(hidden).zip(norms) {
            assert!((norm(state) / f64::from(expected) - 1.0).abs() < 2e-6, "{name}: state");
        }
        let mut next = *choices.last().unwrap();
        let mut greedy = vec![next];
        while greedy.len() < 8 {
            let context = tokens.len() + greedy.len() - 1;
            run(model, &mut cache, context, &[next], AttentionForm::Absorbed);
            next = argmax(model.logits().as_slice());
            greedy.push(next);
        }
        assert_eq!(greedy, integers(&expected["greedy_ids"]), "{name} {form:?}");
    }
}

const MODELS: [(TinyModel, &str); 6] = [
    (TinyModel::A, "A"),
    (TinyModel::B, "B"),
    (TinyModel::C, "C"),
    (TinyModel::D, "D"),
    (TinyModel::AFp8, "A_fp8"),
    (TinyModel::CInt4, "C_int4"),
];

#[test]
fn every_configuration_equals_its_golden_values() {
    let golden = golden();
    for (tiny, name) in MODELS {
        check(&mut single(tiny), &golden["models"][name], name);
    }
}

/// The same values from 2 to 8 ranks, split by width or with whole experts.
#[test]
fn ranks_together_equal_the_golden_values() {
    let golden = Arc::new(golden());
    for (tiny, name) in MODELS {
        let heads = golden["models"][name]["config"]["num_attention_heads"].as_u64().unwrap();
        for ranks in [2, 4, 8] {
            for expert_parallel in [false, true] {
                let width = tiny.config()["moe_intermediate_size"].as_u64().unwrap() as usize;
                let splits =
                    expert_parallel || name != "C_int4" || (width / ranks).is_multiple_of(32);
                if ranks as u64 > heads || !splits {
                    continue;
                }
                let timeout = Duration::from_secs(60);
                let options = GroupOptions { timeout, ..GroupOptions::default() };
                let groups = in_process(ranks, &options).unwrap();
                let threads: Vec<_> = groups
                    .into_iter()
                    .enumerate()
                    .map(|(rank, group)| {
                        let golden = Arc::clone(&golden);
                        thread::spawn(move || {
                            let parallel = Parallel { tensor: ranks, rank, expert_parallel };
                            let communicator = Communicator::connect(group, None).unwrap();
                            let mut model = load(tiny, parallel, communicator);
                            check(&mut model, &golden["models"][name], name);
                        })
                    })
                    .collect();
                for thread in threads {
                    thread.join().unwrap();
                }
            }
        }
    }
}

/// Captured states of config A's prompt and of `root` after it, for drafts.
struct Captured {
    model: Model,
    tokens: Vec<u32>,
    states: paceline_kernels::Tensor,
}

fn captured() -> Captured {
    let mut model = single(TinyModel::A);
    let tokens = integers(&golden()["models"]["A"]["ids"]);
    let mut cache = model.cache(32);
    run(&mut model, &mut cache, 0, &tokens, AttentionForm::Expanded);
    let (hidden, points) = (model.config().hidden, model.config().layers + 1);
    let taps = model.taps().as_slice::<f32>();
    // Streams entering layers 1, 2 and 3.
    let states: Vec<f32> = taps
        .chunks_exact(points * hidden)
        .flat_map(|row| &row[hidden..4 * hidden])
        .copied()
        .collect();
    let states = paceline_kernels::Tensor::from_slice(&[tokens.len(), 3 * hidden], &states);
    Captured { model, tokens, states }
}

/// Draft logits of the last prompt row, then a greedy chain of four.
fn chain(tiny: TinyDraft, root: u32) -> (Vec<f32>, Vec<u32>) {
    let Captured { model, tokens, states } = captured();
    let config = DraftConfig::from_json(&tiny.config().to_string()).unwrap();
    let weights = DraftWeights::load(&checkpoint(&Synthetic::draft(tiny)), &config).unwrap();
    let target = model.config();
    let mut draft =
        Draft::new(config, weights, target, model.embedding(), None, DType::F32, 16).unwrap();
    let stream = Stream::host(1).unwrap();
    let mut cache = draft.cache(32);
    let slots: Vec<u32> = (0..32).collect();
    let mut next: Vec<u32> = tokens[1..].to_vec();
    next.push(root);
    let rows = next.len();
    let positions: Vec<u32> = (0..rows as u32).collect();
    let segment = |context, rows| Segment {
        first_row: 0,
        rows,
        context,
        earlier: 0,
        slots: &slots,
        paths: None,
    };
    let last = rows as u32 - 1;
    let pass = DraftPass {
        tokens: &next,
        states: DraftStates::Captured(&states),
        positions: &positions,
        segments: &[segment(0, rows)],
        logit_rows: &[last],
    };
    draft.forward(&stream, &pass, &mut cache);
    let logits = draft.logits().as_slice::<f32>().to_vec();
    let mut drafted = vec![draft.target_token(argmax(&logits))];
    let mut state = last;
    while drafted.len() < 4 {
        let row = rows + drafted.len() - 1;
        let pass = DraftPass {
            tokens: &drafted[drafted.len() - 1..],
            states: DraftStates::Recurrent(&[state]),
            positions: &[row as u32],
            segments: &[segment(row, 1)],
            logit_rows: &[0],
        };
        draft.forward(&stream, &pass, &mut cache);
        drafted.push(draft.target_token(argmax(draft.logits().as_slice())));
        state = 0;
    }
    (logits, drafted)
}

/// Values printed in section 13 of the specification.
#[test]
fn the_llama_draft_equals_its_golden_values() {
    let (logits, drafted) = chain(TinyDraft::Llama, 316);
    let expected = [-0.47339, -0.10317, 2.82447, 0.82987, -0.25541, -0.74397];
    assert_close(&logits[..6], &expected, "draft logits");
    assert_eq!(drafted, [9, 221, 221, 221]);
}

#[test]
fn the_latent_draft_equals_its_golden_values() {
    let expected = &golden()["models"]["A_draft_mla"];
    let root = expected["root"].as_u64().unwrap() as u32;
    let (logits, drafted) = chain(TinyDraft::Mla, root);
    assert_close(&logits[..8], &floats(&expected["logits_first8"]), "draft logits");
    let norm_expected = expected["logits_norm"].as_f64().unwrap();
    assert!((norm(&logits) / norm_expected - 1.0).abs() < 2e-6);
    assert_eq!(drafted, integers(&expected["chain"]));
}

/// A draft of another width is refused with both numbers.
#[test]
fn a_draft_of_another_model_is_refused() {
    let model = single(TinyModel::B);
    let config = DraftConfig::from_json(&TinyDraft::Llama.config().to_string()).unwrap();
    let weights =
        DraftWeights::load(&checkpoint(&Synthetic::draft(TinyDraft::Llama)), &config).unwrap();
    let target = model.config();
    let refused = Draft::new(config, weights, target, model.embedding(), None, DType::F32, 16);
    let error = refused.err().expect("the vocabularies differ").to_string();
    assert!(error.contains("512") && error.contains("1024"), "{error}");
}
