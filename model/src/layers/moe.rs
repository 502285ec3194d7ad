//! A mixture of experts (DeepSeek-V3, section 2.1.2): router, chosen experts, shared expert.

use paceline_kernels::{
    DType, Stream, Tensor, Weight,
    ops::{
        linear::linear,
        moe::{Expert, MoeScratch, Routing, moe},
        route::{GroupScore, RouterParameters, Scoring, route},
        swiglu::swiglu,
    },
};

use crate::{
    config::{self, MoeConfig, Selection},
    weights::{MlpWeights, MoeWeights},
};

/// The experts of one layer on one rank.
pub(crate) struct MoeLayer {
    router: Weight,
    bias: Option<Tensor>,
    experts: Vec<Expert>,
    first_expert: usize,
    shared: Option<MlpWeights>,
}

impl From<MoeWeights> for MoeLayer {
    fn from(weights: MoeWeights) -> Self {
        let expert = |mlp: MlpWeights| Expert { gate: mlp.gate, up: mlp.up, down: mlp.down };
        Self {
            router: weights.router,
            bias: weights.bias,
            experts: weights.experts.into_iter().map(expert).collect(),
            first_expert: weights.first_expert,
            shared: weights.shared,
        }
    }
}

/// Working memory of the MLPs and experts; serves all layers.
pub(crate) struct FfnWorkspace {
    activated: Tensor,
    router_logits: Tensor,
    routing: Option<(Routing, MoeScratch, RouterParameters)>,
}

impl FfnWorkspace {
    /// Working memory for passes of at most `rows_max` rows. `width_max` is the widest MLP of this
    /// rank, `expert_width` that of an expert.
    pub(crate) fn new(
        moe: Option<&MoeConfig>,
        hidden: usize,
        width_max: usize,
        expert_width: usize,
        dtype: DType,
        rows_max: usize,
    ) -> Self {
        let experts = moe.map_or(0, |moe| moe.experts);
        let routing = moe.map(|moe| {
            let per_token = moe.experts_per_token;
            let scratch = MoeScratch::for_rows(rows_max, per_token, experts, hidden, expert_width);
            (Routing::with_capacity(rows_max, per_token), scratch, router_parameters(moe))
        });
        Self {
            activated: Tensor::zeros(dtype, &[rows_max, width_max]),
            router_logits: Tensor::zeros(DType::F32, &[rows_max, experts]),
            routing,
        }
    }

    /// out = MLP(input), a partial sum on each rank.
    pub(crate) fn dense(
        &mut self,
        stream: &Stream,
        weights: &MlpWeights,
        input: &Tensor,
        out: &mut Tensor,
    ) {
        let (rows, width) = (input.rows(), weights.gate.out_features());
        self.activated.reshape(&[rows, width]);
        swiglu(stream, input, &weights.gate, &weights.up, &mut self.activated);
        linear(stream, &self.activated, &weights.down, out);
    }

    /// out = Σ weight · expert(input) + shared(input), a partial sum on each rank.
    pub(crate) fn experts(
        &mut self,
        stream: &Stream,
        layer: &MoeLayer,
        input: &Tensor,
        out: &mut Tensor,
    ) {
        self.router_logits.set_rows(input.rows());
        linear(stream, input, &layer.router, &mut self.router_logits);
        match &layer.shared {
            Some(shared) => self.dense(stream, shared, input, out),
            None => out.fill_zero(),
        }
        let Some((routing, scratch, parameters)) = &mut self.routing else {
            unreachable!("a configuration without experts has no layer of experts");
        };
        route(&self.router_logits, layer.bias.as_ref(), parameters, routing);
        moe(stream, input, &layer.experts, layer.first_expert, routing, scratch, out);
    }
}

fn router_parameters(moe: &MoeConfig) -> RouterParameters {
    let (group_score, groups) = match moe.selection {
        Selection::Greedy => (GroupScore::Largest, 1),
        Selection::GroupLimitedGreedy => (GroupScore::Largest, moe.groups),
        Selection::NoAuxTc => (GroupScore::SumOfTwo, moe.groups),
    };
    RouterParameters {
        scoring: match moe.scoring {
            config::Scoring::Sigmoid => Scoring::Sigmoid,
            config::Scoring::Softmax => Scoring::Softmax,
        },
        group_score,
        groups,
        groups_per_token: moe.groups_per_token,
        normalize: moe.normalize_weights,
        scale: moe.scaling_factor,
    }
}
