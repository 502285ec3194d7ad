//! Synthetic checkpoints hold the published values, and load in every layout.

use paceline_kernels::{DType, Weight};
use paceline_model::config::{Family, ModelConfig};
use paceline_model::eagle3::config::DraftConfig;
use paceline_model::shard::Parallel;
use paceline_model::synthetic::{Synthetic, SyntheticTensor, TinyDraft, TinyModel};
use paceline_model::weights::{Checkpoint, DraftAttention, DraftWeights, Ffn, ModelWeights, Query};
use serde_json::Value;

fn reference() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../testdata/tiny.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn find<'a>(synthetic: &'a Synthetic, name: &str) -> &'a SyntheticTensor {
    synthetic.tensors.iter().find(|tensor| tensor.name == name).expect(name)
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Writes, opens and loads.
fn load(synthetic: &Synthetic, shards: usize) -> (ModelConfig, ModelWeights) {
    let directory = tempfile::tempdir().unwrap();
    synthetic.write(directory.path(), shards).unwrap();
    let config = ModelConfig::from_file(directory.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let weights = ModelWeights::load(&checkpoint, &config, &Parallel::SINGLE, &mut |_, _| ());
    (config, weights.unwrap())
}

#[test]
fn configurations_are_those_of_the_reference() {
    let models = &reference()["models"];
    for (tiny, name) in [
        (TinyModel::A, "A"),
        (TinyModel::B, "B"),
        (TinyModel::C, "C"),
        (TinyModel::D, "D"),
        (TinyModel::AFp8, "A_fp8"),
        (TinyModel::CInt4, "C_int4"),
    ] {
        let expected = ModelConfig::from_json(&models[name]["config"].to_string()).unwrap();
        let mut found = ModelConfig::from_json(&tiny.config().to_string()).unwrap();
        // The reference declares no storage.
        found.quantization = expected.quantization;
        found.warnings.clone_from(&expected.warnings);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn tensors_are_as_many_as_published() {
    assert_eq!(Synthetic::model(TinyModel::A).tensors.len(), 201);
    assert_eq!(Synthetic::model(TinyModel::B).tensors.len(), 193);
}

#[test]
fn packed_values_are_those_of_the_reference() {
    let reference = reference();
    let examples = &reference["models"]["C_int4"]["quantised_examples"];
    let int4 = Synthetic::model(TinyModel::CInt4);
    let module = "model.layers.1.mlp.experts.0.down_proj";
    let example = &examples[&format!("{module}.weight")];
    let packed = &find(&int4, &format!("{module}.weight_packed")).bytes;
    let words = packed.chunks_exact(4).map(|raw| i32::from_le_bytes(raw.try_into().unwrap()));
    let words: Vec<f64> = words.take(4).map(f64::from).collect();
    assert_eq!(words, numbers(&example["packed"]));
    let scale = &find(&int4, &format!("{module}.weight_scale")).bytes;
    let scale = scale.chunks_exact(2).map(|raw| half::bf16::from_le_bytes([raw[0], raw[1]]));
    let scale: Vec<f64> = scale.take(4).map(f64::from).collect();
    assert_eq!(scale, numbers(&example["scale"]));

    let fp8 = Synthetic::model(TinyModel::AFp8);
    let examples = &reference["models"]["A_fp8"]["quantised_examples"];
    for (name, example) in examples.as_object().unwrap() {
        let bytes: Vec<f64> =
            find(&fp8, name).bytes.iter().take(8).map(|&byte| f64::from(byte)).collect();
        assert_eq!(bytes, numbers(&example["bytes"]), "{name}");
        let scale = find(&fp8, &format!("{name}_scale_inv"));
        let shape: Vec<f64> = scale.shape.iter().map(|&length| length as f64).collect();
        assert_eq!(shape, numbers(&example["scale_shape"]), "{name}");
        for (raw, expected) in scale.bytes.chunks_exact(4).zip(numbers(&example["scale_inv"])) {
            let value = f32::from_le_bytes(raw.try_into().unwrap());
            assert_eq!(value, expected as f32, "{name}");
        }
    }
}

#[test]
fn every_tiny_model_loads() {
    for tiny in TinyModel::ALL {
        let synthetic = Synthetic::model(tiny);
        let (config, weights) = load(&synthetic, 1);
        let full = matches!(weights.layers[0].attention.query, Query::Full(_));
        assert_eq!(full, config.q_lora_rank.is_none(), "{tiny:?}");
        let Ffn::Moe(moe) = &weights.layers[2].ffn else { panic!("{tiny:?}: layer 2 has experts") };
        assert_eq!(moe.bias.is_none(), tiny == TinyModel::D);
        let expert = &moe.experts[7].up;
        match tiny {
            TinyModel::AFp8 => assert!(matches!(expert, Weight::Fp8(_))),
            TinyModel::CInt4 => assert!(matches!(expert, Weight::Int4(_))),
            _ => assert!(matches!(expert, Weight::Float(t) if t.dtype() == DType::F32)),
        }
        // Packed projections of the latent are unpacked to f32 before they are split.
        let key_up = weights.layers[3].attention.key_up.dequantize();
        let rows = config.heads * config.qk_nope_head_dim;
        assert_eq!(key_up.shape(), [rows, config.kv_lora_rank]);
    }
}

#[test]
fn a_kimi_k25_layout_loads_with_the_same_weights() {
    let (_, plain) = load(&Synthetic::model(TinyModel::CInt4), 1);
    let wrapped = Synthetic::kimi_k25();
    let names: Vec<&str> = wrapped.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert!(names.contains(&"language_model.lm_head.weight"));
    let (config, weights) = load(&wrapped, 4);
    assert_eq!(config.family, Family::KimiK25);
    let (Ffn::Moe(moe), Ffn::Moe(expected)) = (&weights.layers[3].ffn, &plain.layers[3].ffn) else {
        panic!("layer 3 has experts")
    };
    for (expert, expected) in moe.experts.iter().zip(&expected.experts) {
        assert_eq!(expert.down.dequantize().to_f32_vec(), expected.down.dequantize().to_f32_vec());
    }
    assert_eq!(weights.head.dequantize().to_f32_vec(), plain.head.dequantize().to_f32_vec());

    // Repacks that leave out `.model` are the same.
    let mut short = wrapped.clone();
    for tensor in &mut short.tensors {
        tensor.name = tensor.name.replace("language_model.model.", "language_model.");
    }
    let (_, weights) = load(&short, 3);
    assert_eq!(weights.final_norm.to_f32_vec(), plain.final_norm.to_f32_vec());
}

#[test]
fn rounded_models_load_as_bf16() {
    let mut synthetic = Synthetic::kimi_k25();
    synthetic.round_to_bf16();
    let (_, weights) = load(&synthetic, 2);
    assert_eq!(weights.embedding.dtype(), DType::BF16);
    assert_eq!(weights.final_norm.dtype(), DType::F32);
    let key_up = &weights.layers[0].attention.key_up;
    assert!(matches!(key_up, Weight::Float(t) if t.dtype() == DType::BF16));
}

#[test]
fn drafts_of_both_kinds_load_under_every_spelling() {
    for tiny in [TinyDraft::Llama, TinyDraft::Mla] {
        for spelling in ["midlayer.", "layers.0.", "model.layers.0."] {
            let mut synthetic = Synthetic::draft(tiny);
            for tensor in &mut synthetic.tensors {
                tensor.name = tensor.name.replace("midlayer.", spelling);
            }
            let directory = tempfile::tempdir().unwrap();
            synthetic.write(directory.path(), 1).unwrap();
            let config = DraftConfig::from_file(directory.path().join("config.json")).unwrap();
            let checkpoint = Checkpoint::open(directory.path()).unwrap();
            let draft = DraftWeights::load(&checkpoint, &config).unwrap();
            let map: Vec<u32> = (0..128).map(|id| 4 * id + 1).collect();
            assert_eq!(draft.draft_to_target, map);
            assert_eq!(draft.fc.in_features(), 768);
            assert!(draft.embedding.is_none());
            assert_eq!(draft.head.unwrap().out_features(), 128);
            match (tiny, &draft.attention) {
                (TinyDraft::Llama, DraftAttention::Llama(attention)) => {
                    assert_eq!(attention.key.dequantize().shape(), [128, 512]);
                }
                (TinyDraft::Mla, DraftAttention::Mla(attention)) => {
                    assert_eq!(attention.kv_down.dequantize().shape(), [96, 512]);
                }
                _ => panic!("{tiny:?} has the other attention"),
            }
        }
    }
}
