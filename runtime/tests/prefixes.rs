//! Rows of earlier requests are reused: the same bits for prompts, the same up to rounding for
//! answers, and nothing that does not belong to the prompt.

mod common;

use common::{Arrival, demo_options, prompts, serve_all, serve_one, threads};
use paceline_runtime::{Engine, EngineOptions, Request, Speculation};
use paceline_spec::TreeParameters;

/// Rows of answers differ by rounding from those of prompts; where the two largest logits are
/// nearer to each other than this, another one may be chosen.
const TIE_GAP_MAX: f32 = 1e-3;

fn load(options: EngineOptions) -> Engine {
    Engine::load(options, threads(1), &mut |_, _| {}).unwrap()
}

fn modes() -> [Speculation; 3] {
    let tree = Speculation::Tree(TreeParameters::new(4, 4, 16).unwrap());
    [Speculation::Off, Speculation::Chain(4), tree]
}

fn request(prompt: Vec<u32>, tokens: usize, speculation: Speculation) -> Request {
    Request { ignore_eos: true, speculation, ..Request::new(prompt, tokens) }
}

/// A prompt of some hundred tokens, made of the reference's.
fn long_prompt(first: usize) -> Vec<u32> {
    let prompts = prompts();
    (0..6).flat_map(|place| prompts[(first + place) % prompts.len()].ids.clone()).collect()
}

/// An engine that reuses nothing, to compare with.
fn forgetful() -> Engine {
    load(EngineOptions { prefix_reuse: false, ..demo_options() })
}

#[test]
fn a_prompt_that_was_seen_is_not_computed_again() {
    let mut forgetful = forgetful();
    for speculation in modes() {
        let mut engine = load(demo_options());
        let request = request(long_prompt(0), 40, speculation);
        let first = serve_one(&mut engine, &request);
        let again = serve_one(&mut engine, &request);
        assert_eq!(first.prefix_reused, 0);
        // All but the last token, whose logits give the answer, and for drafts the one before it,
        // whose row in the draft's cache may have another token.
        let reused = again.prefix_reused;
        assert!(reused + 2 >= request.prompt.len(), "{reused} of {}", request.prompt.len());
        assert_eq!(again.tokens, first.tokens, "{speculation:?}");
        assert_eq!(again.accepted, first.accepted, "{speculation:?}");
        assert_eq!(first.tokens, serve_one(&mut forgetful, &request).tokens);
    }
}

/// Prompts that part at every place around a page's end: the draft's rows there depend on the
/// token after them.
#[test]
fn prompts_that_part_anywhere_answer_as_if_they_were_alone() {
    let (whole, mut forgetful) = (long_prompt(1), forgetful());
    for speculation in modes() {
        let mut engine = load(demo_options());
        serve_one(&mut engine, &request(whole.clone(), 8, speculation));
        for length in [15, 16, 17, 31, 32, 33, 70, 96] {
            let mut prompt = whole[..length].to_vec();
            prompt.extend_from_slice(&prompts()[7].ids);
            let request = request(prompt, 24, speculation);
            let got = serve_one(&mut engine, &request);
            let expected = serve_one(&mut forgetful, &request);
            assert!(got.prefix_reused <= length && got.prefix_reused + 2 >= length);
            assert_eq!(got.tokens, expected.tokens, "{speculation:?} {length}");
            assert_eq!(got.accepted, expected.accepted, "{speculation:?} {length}");
        }
    }
}

/// Requests with and without drafts, at the same time, from the same prompt.
#[test]
fn sequences_share_prompts_while_they_run() {
    let whole = long_prompt(2);
    let requests: Vec<Request> = (0..9)
        .map(|index| {
            let mut prompt = whole[..whole.len() - 3 * index].to_vec();
            prompt.extend(prompts()[index].ids.iter().take(4));
            request(prompt, 20, modes()[index % 3])
        })
        .collect();
    let mut engine = load(EngineOptions { cache_tokens: 1024, ..demo_options() });
    let arrivals: Vec<Arrival> = requests
        .iter()
        .enumerate()
        .map(|(at, request)| Arrival::new(at, request.clone()))
        .collect();
    let got = serve_all(&mut engine, &arrivals);
    let reused: usize = got.iter().map(|outcome| outcome.prefix_reused).sum();
    assert!(reused > whole.len(), "{reused} rows were reused");
    let mut forgetful = forgetful();
    for (got, request) in got.iter().zip(&requests) {
        let expected = serve_one(&mut forgetful, request);
        assert_eq!(got.tokens, expected.tokens, "{:?}", request.speculation);
    }
}

/// A conversation: each prompt is the prompt and the answer before it, and something new.
#[test]
fn conversations_reuse_answers_up_to_rounding() {
    println!("gap below which a conversation may part: {TIE_GAP_MAX}");
    let mut forgetful = forgetful();
    for prefix_reuse_of_answers in [true, false] {
        for speculation in modes() {
            let mut engine = load(EngineOptions { prefix_reuse_of_answers, ..demo_options() });
            let mut prompt = long_prompt(3);
            for turn in 0..3 {
                let request = Request { top_logits: 2, ..request(prompt.clone(), 40, speculation) };
                let mut gaps = Vec::new();
                let got = engine
                    .generate(&request, |event| {
                        if let paceline_runtime::Event::Token(token) = event {
                            let top = &token.logits.as_ref().unwrap().top;
                            gaps.push(top[0].1 - top[1].1);
                        }
                        std::ops::ControlFlow::Continue(())
                    })
                    .unwrap();
                let expected = serve_one(&mut forgetful, &request);
                let parted =
                    got.tokens.iter().zip(&expected.tokens).position(|(got, own)| got != own);
                if let Some(at) = parted {
                    println!("{speculation:?}, turn {turn}: parts at {at}, gap {}", gaps[at]);
                    assert!(prefix_reuse_of_answers, "the same bits give the same answers");
                    assert!(gaps[at] < TIE_GAP_MAX, "{speculation:?}: gap {}", gaps[at]);
                }
                if turn > 0 && prefix_reuse_of_answers {
                    let (reused, length) = (got.prefix_reused, prompt.len());
                    assert!(reused + 8 > length - 6, "{speculation:?}: {reused} of {length}");
                }
                prompt.extend_from_slice(&got.tokens);
                prompt.extend(prompts()[turn].ids.iter().take(6));
            }
        }
    }
}
