//! Mixture-of-experts part of a configuration: sizes and routing rule.
//!
//! Invariant: a [`MoeConfig`] describes a router that exists, DeepSeek-V2's (softmax; DeepSeek-V2,
//! section 2.1.4) or DeepSeek-V3's (sigmoid with a selection bias; DeepSeek-V3, section 2.1.2),
//! and its groups always hold enough experts.

use super::section::Section;
use super::{EXPERT_WIDTH_MAX, EXPERTS_MAX, Family};
use crate::ModelError;

/// Experts of one layer and how tokens find them.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts (E).
    pub experts: usize,
    /// Shared experts (S): one MLP of width `shared_experts * intermediate`; 0 for none.
    pub shared_experts: usize,
    /// Routed experts per token (k).
    pub experts_per_token: usize,
    /// Width of each routed expert.
    pub intermediate: usize,
    /// Groups of experts for group-limited selection; 1 for no groups.
    pub groups: usize,
    /// Groups kept per token.
    pub groups_per_token: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// How experts are chosen from the scores.
    pub selection: Selection,
    /// Whether the chosen scores are divided by their sum.
    pub normalize_weights: bool,
    /// Factor on the routed weights, never on the shared experts.
    pub scaling_factor: f32,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Each expert by itself (DeepSeek-V3, Kimi).
    Sigmoid,
    /// Over all experts (DeepSeek-V2).
    Softmax,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The k best scores.
    Greedy,
    /// The k best within the best groups; a group counts by its best score.
    GroupLimitedGreedy,
    /// The k best biased scores within the best groups; a group counts by its two best biased
    /// scores. The bias only selects; a bias tensor exists.
    NoAuxTc,
}

impl MoeConfig {
    /// Reads the router keys; `None` for a model without experts.
    pub(super) fn read(section: &Section<'_>, family: Family) -> Result<Option<Self>, ModelError> {
        if section.value("n_routed_experts").is_none() {
            return Self::refuse_left_overs(section).map(|()| None);
        }
        let experts = section.size("n_routed_experts", EXPERTS_MAX)?;
        let (scoring, selection) = router_kind(section, family)?;
        let (groups, groups_per_token) = match selection {
            Selection::Greedy => (1, 1),
            _ => (section.size("n_group", experts)?, section.size("topk_group", experts)?),
        };
        let normalizes = scoring == Scoring::Sigmoid;
        let scaling_default = if family == Family::DeepseekV2 { 1.0 } else { 2.5 };
        let scaling = section.number("routed_scaling_factor", 1e-3..=1e3)?;
        let moe = Self {
            experts,
            shared_experts: section.integer("n_shared_experts", 0..=SHARED_MAX)?.unwrap_or(0),
            experts_per_token: section.size("num_experts_per_tok", experts)?,
            intermediate: section.size("moe_intermediate_size", EXPERT_WIDTH_MAX)?,
            groups,
            groups_per_token,
            scoring,
            selection,
            normalize_weights: section.flag("norm_topk_prob", normalizes)?,
            scaling_factor: scaling.unwrap_or(scaling_default) as f32,
        };
        moe.check(section)?;
        Ok(Some(moe))
    }

    fn refuse_left_overs(section: &Section<'_>) -> Result<(), ModelError> {
        // An explicit null means a dense model whatever else is written.
        let left_over = section.value("num_experts_per_tok").is_some();
        if left_over && !section.has("n_routed_experts") {
            let expected = "the number of experts, or null for a model without experts";
            return Err(section.missing("n_routed_experts", expected));
        }
        Ok(())
    }

    fn check(&self, section: &Section<'_>) -> Result<(), ModelError> {
        if self.scoring == Scoring::Softmax && self.normalize_weights {
            // DeepSeek's code then drops the scaling factor, others ignore the flag.
            let expected =
                "false with softmax scoring (published implementations disagree on true)";
            return Err(section.invalid("norm_topk_prob", expected));
        }
        if !self.experts.is_multiple_of(self.groups) {
            let expected = format!("a divisor of n_routed_experts = {}", self.experts);
            return Err(section.invalid("n_group", expected));
        }
        let group = self.experts / self.groups;
        if self.groups > 1 && self.selection == Selection::NoAuxTc && group < 2 {
            let expected = "a number of groups with at least two experts in each";
            return Err(section.invalid("n_group", expected));
        }
        if self.groups_per_token > self.groups {
            let expected = format!("at most n_group = {}", self.groups);
            return Err(section.invalid("topk_group", expected));
        }
        let reachable = self.groups_per_token * group;
        if self.experts_per_token > reachable {
            let expected = format!("at most topk_group * n_routed_experts / n_group = {reachable}");
            return Err(section.invalid("num_experts_per_tok", expected));
        }
        Ok(())
    }
}

fn router_kind(section: &Section<'_>, family: Family) -> Result<(Scoring, Selection), ModelError> {
    let old = family == Family::DeepseekV2;
    let scoring = match section.text("scoring_func")? {
        None if old => Scoring::Softmax,
        None | Some("sigmoid") => Scoring::Sigmoid,
        Some("softmax") => Scoring::Softmax,
        Some(_) => return Err(section.invalid("scoring_func", "\"sigmoid\" or \"softmax\"")),
    };
    let selection = match section.text("topk_method")? {
        None if old => Selection::Greedy,
        None | Some("noaux_tc") => Selection::NoAuxTc,
        Some("greedy") => Selection::Greedy,
        Some("group_limited_greedy") => Selection::GroupLimitedGreedy,
        Some(_) => {
            let expected = "\"noaux_tc\", \"greedy\" or \"group_limited_greedy\"";
            return Err(section.invalid("topk_method", expected));
        }
    };
    // A bias tensor, sigmoid scores and noaux_tc only exist together.
    if (scoring == Scoring::Sigmoid) != (selection == Selection::NoAuxTc) {
        let expected = "\"noaux_tc\" with sigmoid scoring, a greedy method with softmax scoring";
        return Err(section.invalid("topk_method", expected));
    }
    Ok((scoring, selection))
}

const SHARED_MAX: usize = 64;
