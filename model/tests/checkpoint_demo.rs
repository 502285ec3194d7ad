//! Loading of the embedded demo model: fast, complete, and put together in one memory.

use std::time::Instant;

use paceline_kernels::{DType, Weight};
use paceline_model::config::ModelConfig;
use paceline_model::shard::Parallel;
use paceline_model::weights::{Ffn, ModelWeights, Query, Source};

/// Whether the weight lies in the memory that starts with the embedding, not in the embedded file.
fn is_gathered(weight: &Weight, weights: &ModelWeights) -> bool {
    let Source::Embedded(files) = Source::DEMO else { unreachable!() };
    let file = files.weights.as_ptr_range();
    let first = weights.embedding.as_ptr();
    // The widened norms take little more.
    let memory = first..first.wrapping_add(files.weights.len() + (1 << 20));
    let inside = |tensor: &paceline_kernels::Tensor| {
        let at = tensor.as_ptr();
        memory.contains(&at) && !file.contains(&at) && (at as usize).is_multiple_of(64)
    };
    match weight {
        Weight::Float(values) => inside(values),
        Weight::Int4(weight) => inside(&weight.packed) && inside(&weight.scale),
        Weight::Fp8(weight) => inside(&weight.codes) && inside(&weight.scale),
    }
}

/// A weight is the same as in the file.
fn assert_same(weight: &Weight, name: &str) {
    let checkpoint = Source::DEMO.checkpoint().unwrap();
    let parts = match weight {
        Weight::Float(values) => vec![(values, "weight")],
        Weight::Int4(weight) => {
            vec![(&weight.packed, "weight_packed"), (&weight.scale, "weight_scale")]
        }
        Weight::Fp8(_) => panic!("the demo has no FP8"),
    };
    for (part, suffix) in parts {
        let stored = checkpoint.tensor(&format!("{name}.{suffix}")).unwrap();
        assert_eq!((part.dtype(), part.shape()), (stored.dtype(), stored.shape()), "{name}");
        assert!((0..part.rows()).all(|row| part.row_bytes(row) == stored.row_bytes(row)), "{name}");
    }
}

#[test]
fn demo_model_is_put_together_unchanged() {
    let start = Instant::now();
    let config = ModelConfig::from_json(&Source::DEMO.config().unwrap()).unwrap();
    let checkpoint = Source::DEMO.checkpoint().unwrap();
    let mut progress = (0, 0);
    let mut calls = 0;
    let weights =
        ModelWeights::load(&checkpoint, &config, &Parallel::SINGLE, &mut |done, total| {
            assert!(done > progress.0 && done <= total, "{done} of {total}");
            progress = (done, total);
            calls += 1;
        })
        .unwrap();
    println!("demo model loaded in {:?}", start.elapsed());
    assert_eq!(progress.0, progress.1);
    assert!(calls > 100);
    // All of the file but the header and the logical shapes of the packed weights.
    let shapes = 8 * 7 * 16 * 3;
    assert_eq!(progress.1 + shapes, checkpoint.bytes());

    let in_memory = |weight: &Weight| is_gathered(weight, &weights);
    assert_eq!(weights.embedding.shape(), [4096, 256]);
    assert_eq!(weights.head.out_features(), 4096);
    assert!(in_memory(&weights.head) && in_memory(&Weight::Float(weights.embedding.clone())));
    assert_same(&weights.head, "lm_head");
    assert_same(&Weight::Float(weights.embedding.clone()), "model.embed_tokens");
    assert_eq!(weights.layers.len(), 8);
    for (index, layer) in weights.layers.iter().enumerate() {
        assert_eq!(layer.attention_norm.dtype(), DType::F32);
        let attention = &layer.attention;
        let Query::LowRank { down, up, .. } = &attention.query else { panic!("low rank") };
        for weight in [down, up, &attention.kv_down, &attention.output] {
            assert!(in_memory(weight), "layer {index}");
        }
        let prefix = format!("model.layers.{index}.");
        assert_same(&attention.output, &format!("{prefix}self_attn.o_proj"));
        assert!(matches!(&attention.key_up, Weight::Float(t) if t.dtype() == DType::BF16));
        match &layer.ffn {
            Ffn::Dense(mlp) => {
                assert_eq!(index, 0);
                assert!(in_memory(&mlp.gate) && in_memory(&mlp.up) && in_memory(&mlp.down));
            }
            Ffn::Moe(moe) => {
                assert_eq!((moe.experts.len(), moe.first_expert), (16, 0));
                for (expert, mlp) in moe.experts.iter().enumerate() {
                    assert_same(&mlp.down, &format!("{prefix}mlp.experts.{expert}.down_proj"));
                }
                for mlp in moe.experts.iter().chain(&moe.shared) {
                    assert!(in_memory(&mlp.gate) && in_memory(&mlp.up) && in_memory(&mlp.down));
                }
                assert!(matches!(moe.experts[3].down, Weight::Int4(_)));
                assert_eq!(moe.router.dequantize().shape(), [16, 256]);
                assert_eq!(moe.bias.as_ref().unwrap().shape(), [16]);
            }
        }
    }
}
