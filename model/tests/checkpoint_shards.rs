//! Every rank's weights are slices of the whole model's, and take the memory that reports predict.

use std::ops::Range;

use paceline_kernels::Weight;
use paceline_model::config::ModelConfig;
use paceline_model::shard::Parallel;
use paceline_model::synthetic::{Synthetic, TinyModel};
use paceline_model::weights::{
    AttentionWeights, Checkpoint, Ffn, MlpWeights, ModelWeights, Query, RankBytes, Report,
};

struct Opened {
    config: ModelConfig,
    checkpoint: Checkpoint,
    whole: ModelWeights,
}

impl Opened {
    fn new(synthetic: &Synthetic) -> Self {
        let directory = tempfile::tempdir().unwrap();
        synthetic.write(directory.path(), 1).unwrap();
        let config = ModelConfig::from_file(directory.path().join("config.json")).unwrap();
        // Maps outlive the names of their files.
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let whole = load(&checkpoint, &config, Parallel::SINGLE);
        Self { config, checkpoint, whole }
    }
}

fn load(checkpoint: &Checkpoint, config: &ModelConfig, parallel: Parallel) -> ModelWeights {
    ModelWeights::load(checkpoint, config, &parallel, &mut |_, _| ()).unwrap()
}

fn values(weight: &Weight) -> Vec<f32> {
    weight.dequantize().to_f32_vec()
}

/// Rows and columns of the whole weight, dequantised.
fn slice(whole: &Weight, rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
    let (width, values) = (whole.in_features(), values(whole));
    rows.flat_map(|row| values[row * width..][columns.clone()].to_vec()).collect()
}

fn assert_rows(part: &Weight, whole: &Weight, rows: Range<usize>, what: &str) {
    assert_eq!(part.out_features(), rows.len(), "{what}");
    assert!(values(part) == slice(whole, rows, 0..whole.in_features()), "{what}");
}

fn assert_columns(part: &Weight, whole: &Weight, columns: Range<usize>, what: &str) {
    assert_eq!(part.in_features(), columns.len(), "{what}");
    assert!(values(part) == slice(whole, 0..whole.out_features(), columns), "{what}");
}

/// The rank's part of `size`.
fn even(parallel: Parallel, size: usize) -> Range<usize> {
    let part = size / parallel.tensor;
    parallel.rank * part..(parallel.rank + 1) * part
}

fn assert_mlp(part: &MlpWeights, whole: &MlpWeights, parallel: Parallel, what: &str) {
    let range = even(parallel, whole.gate.out_features());
    assert_rows(&part.gate, &whole.gate, range.clone(), what);
    assert_rows(&part.up, &whole.up, range.clone(), what);
    assert_columns(&part.down, &whole.down, range, what);
}

fn assert_attention(part: &AttentionWeights, whole: &AttentionWeights, parallel: Parallel) {
    let rows = |weight: &Weight| even(parallel, weight.out_features());
    match (&part.query, &whole.query) {
        (Query::Full(part), Query::Full(whole)) => assert_rows(part, whole, rows(whole), "q"),
        (Query::LowRank { down, up, .. }, Query::LowRank { down: all, up: whole, .. }) => {
            assert_rows(down, all, 0..all.out_features(), "q_a");
            assert_rows(up, whole, rows(whole), "q_b");
        }
        _ => panic!("another kind of query"),
    }
    assert_rows(&part.kv_down, &whole.kv_down, 0..whole.kv_down.out_features(), "kv_a");
    for (part, whole) in [
        (&part.key_up, &whole.key_up),
        (&part.key_up_transposed, &whole.key_up_transposed),
        (&part.value_up, &whole.value_up),
    ] {
        assert_rows(part, whole, rows(whole), "kv_b");
    }
    assert_columns(&part.output, &whole.output, even(parallel, whole.output.in_features()), "o");
}

fn assert_rank(opened: &Opened, parallel: Parallel) -> ModelWeights {
    let Opened { config, checkpoint, whole } = opened;
    let part = load(checkpoint, config, parallel);
    assert_rows(&part.head, &whole.head, part.head_rows.clone(), "head");
    for (layer, (part, whole)) in part.layers.iter().zip(&whole.layers).enumerate() {
        assert_attention(&part.attention, &whole.attention, parallel);
        match (&part.ffn, &whole.ffn) {
            (Ffn::Dense(part), Ffn::Dense(whole)) => assert_mlp(part, whole, parallel, "dense"),
            (Ffn::Moe(part), Ffn::Moe(whole)) => {
                for (index, expert) in part.experts.iter().enumerate() {
                    let whole = &whole.experts[part.first_expert + index];
                    let split = match parallel.expert_parallel {
                        true => Parallel::SINGLE,
                        false => parallel,
                    };
                    assert_mlp(expert, whole, split, &format!("layer {layer} expert {index}"));
                }
                let (part, whole) = (part.shared.as_ref(), whole.shared.as_ref());
                assert_mlp(part.unwrap(), whole.unwrap(), parallel, "shared");
            }
            _ => panic!("layer {layer} is of another kind"),
        }
    }
    part
}

fn held(weights: &ModelWeights) -> RankBytes {
    let mut bytes = RankBytes::default();
    let mut mapped = |weight: &Weight| bytes.mapped += weight.bytes() as u64;
    mapped(&weights.head);
    mapped(&Weight::Float(weights.embedding.clone()));
    let mut copied = weights.final_norm.bytes();
    for layer in &weights.layers {
        let attention = &layer.attention;
        copied += layer.attention_norm.bytes() + layer.ffn_norm.bytes();
        copied += attention.kv_norm.bytes() + attention.key_up.bytes();
        copied += attention.key_up_transposed.bytes() + attention.value_up.bytes();
        mapped(&attention.kv_down);
        mapped(&attention.output);
        match &attention.query {
            Query::Full(weight) => mapped(weight),
            Query::LowRank { down, norm, up } => {
                mapped(down);
                mapped(up);
                copied += norm.bytes();
            }
        }
        match &layer.ffn {
            Ffn::Dense(mlp) => [&mlp.gate, &mlp.up, &mlp.down].into_iter().for_each(&mut mapped),
            Ffn::Moe(moe) => {
                for mlp in moe.experts.iter().chain(&moe.shared) {
                    [&mlp.gate, &mlp.up, &mlp.down].into_iter().for_each(&mut mapped);
                }
                copied += moe.router.bytes() + moe.bias.as_ref().map_or(0, |bias| bias.bytes());
            }
        }
    }
    bytes.copied = copied as u64;
    bytes
}

fn assert_all_ranks(opened: &Opened, tensor: usize, expert_parallel: bool) {
    let Opened { config, checkpoint, .. } = opened;
    let report = Report::of_checkpoint(checkpoint, config, tensor, expert_parallel);
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    assert_eq!(report.ranks.len(), tensor);
    let (mut head_rows, mut experts) = (Vec::new(), Vec::new());
    for rank in 0..tensor {
        let part = assert_rank(opened, Parallel { tensor, rank, expert_parallel });
        assert_eq!(report.ranks[rank], held(&part), "rank {rank} of {tensor}");
        head_rows.extend(part.head_rows);
        let Ffn::Moe(moe) = &part.layers[1].ffn else { panic!("layer 1 has experts") };
        experts.extend(moe.first_expert..moe.first_expert + moe.experts.len());
    }
    assert_eq!(head_rows, (0..config.vocabulary).collect::<Vec<_>>());
    if expert_parallel {
        assert_eq!(experts, (0..config.moe.as_ref().unwrap().experts).collect::<Vec<_>>());
    }
}

#[test]
fn ranks_hold_slices_of_int4_experts() {
    let opened = Opened::new(&Synthetic::model(TinyModel::CInt4));
    for (tensor, expert_parallel) in [(1, false), (2, false), (8, false), (2, true), (8, true)] {
        assert_all_ranks(&opened, tensor, expert_parallel);
    }
}

#[test]
fn ranks_hold_slices_of_fp8_blocks() {
    let opened = Opened::new(&Synthetic::model(TinyModel::AFp8));
    for (tensor, expert_parallel) in [(2, false), (4, false), (4, true)] {
        assert_all_ranks(&opened, tensor, expert_parallel);
    }
}

#[test]
fn ranks_hold_slices_of_floats() {
    for tiny in [TinyModel::B, TinyModel::D] {
        let opened = Opened::new(&Synthetic::model(tiny));
        for (tensor, expert_parallel) in [(2, false), (4, false), (4, true)] {
            assert_all_ranks(&opened, tensor, expert_parallel);
        }
    }
}

/// 509 is prime, so parts of the vocabulary differ; the head is the embedding.
#[test]
fn ranks_hold_slices_of_a_tied_head() {
    let mut config = TinyModel::A.config();
    config["vocab_size"] = 509.into();
    config["tie_word_embeddings"] = true.into();
    let storage = paceline_model::synthetic::Storage::F32;
    let opened = Opened::new(&Synthetic::of_config(config, storage).unwrap());
    let mut rows = Vec::new();
    for rank in 0..4 {
        let parallel = Parallel { tensor: 4, rank, expert_parallel: false };
        let part = assert_rank(&opened, parallel);
        let whole = Weight::Float(opened.whole.embedding.clone());
        assert_rows(&part.head, &whole, part.head_rows.clone(), "tied head");
        rows.push(part.head_rows);
    }
    assert_eq!(rows, [0..128, 128..256, 256..384, 384..509]);
}
