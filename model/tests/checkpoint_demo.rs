//! Loading of the embedded demo model: fast, complete, and without copies of its weights.

use std::time::Instant;

use paceline_kernels::{DType, Weight};
use paceline_model::config::ModelConfig;
use paceline_model::shard::Parallel;
use paceline_model::weights::{Ffn, ModelWeights, Query, Source};

/// Whether the weight's bytes lie in the embedded file.
fn is_view(weight: &Weight) -> bool {
    let Source::Embedded(files) = Source::DEMO else { unreachable!() };
    let range = files.weights.as_ptr_range();
    let inside = |tensor: &paceline_kernels::Tensor| range.contains(&tensor.as_ptr());
    match weight {
        Weight::Float(values) => inside(values),
        Weight::Int4(weight) => inside(&weight.packed) && inside(&weight.scale),
        Weight::Fp8(weight) => inside(&weight.codes) && inside(&weight.scale),
    }
}

#[test]
fn demo_model_loads_as_views() {
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

    assert_eq!(weights.embedding.shape(), [4096, 256]);
    assert_eq!(weights.head.out_features(), 4096);
    assert!(is_view(&weights.head) && is_view(&Weight::Float(weights.embedding.clone())));
    assert_eq!(weights.layers.len(), 8);
    for (index, layer) in weights.layers.iter().enumerate() {
        assert_eq!(layer.attention_norm.dtype(), DType::F32);
        let attention = &layer.attention;
        let Query::LowRank { down, up, .. } = &attention.query else { panic!("low rank") };
        for weight in [down, up, &attention.kv_down, &attention.output] {
            assert!(is_view(weight), "layer {index}");
        }
        assert!(matches!(&attention.key_up, Weight::Float(t) if t.dtype() == DType::BF16));
        match &layer.ffn {
            Ffn::Dense(mlp) => {
                assert_eq!(index, 0);
                assert!(is_view(&mlp.gate) && is_view(&mlp.up) && is_view(&mlp.down));
            }
            Ffn::Moe(moe) => {
                assert_eq!((moe.experts.len(), moe.first_expert), (16, 0));
                for mlp in moe.experts.iter().chain(&moe.shared) {
                    assert!(is_view(&mlp.gate) && is_view(&mlp.up) && is_view(&mlp.down));
                }
                assert!(matches!(moe.experts[3].down, Weight::Int4(_)));
                assert_eq!(moe.router.dequantize().shape(), [16, 256]);
                assert_eq!(moe.bias.as_ref().unwrap().shape(), [16]);
            }
        }
    }
}
