//! Jinja templates of checkpoints.

use std::fs;

use paceline_model::ModelError;
use paceline_model::chat::{ChatOptions, ChatTemplate, Message};
use serde_json::{Value, json};

fn options(add_generation_prompt: bool) -> ChatOptions {
    ChatOptions { add_generation_prompt, ..ChatOptions::default() }
}

/// Renders a template with these messages.
fn try_render(source: &str, messages: Value, tools: Option<&Value>) -> Result<String, ModelError> {
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    let template = ChatTemplate::from_source(source, Some("<s>"), Some("</s>"))?;
    template.render(&messages, tools, &options(true))
}

#[track_caller]
fn render(source: &str) -> String {
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "tool", "content": null}]);
    try_render(source, messages, None).unwrap()
}

#[test]
fn renders_the_demo_prompts() {
    let template = ChatTemplate::from_dir(crate::demo_dir()).unwrap();
    let reference = crate::reference("stories-moe.json");
    let mut count = 0;
    for prompt in reference["prompts"].as_array().unwrap() {
        if prompt["kind"] != "chat" {
            continue;
        }
        let messages: Vec<Message> = serde_json::from_value(prompt["messages"].clone()).unwrap();
        let text = template.render(&messages, None, &options(true)).unwrap();
        assert_eq!(text, prompt["text"].as_str().unwrap());
        count += 1;
    }
    assert_eq!(count, 5);
}

#[test]
fn behaves_as_jinja_does_in_python() {
    // Blocks take their line break and the spaces before them away; the last line break is lost.
    assert_eq!(render("{% if true %}\n  {% set x = 1 %}\na\n{% endif %}\nb\n"), "a\nb");
    assert_eq!(render("{{ true }} {{ none }} {{ 1.0 }} {{ [1, 'a'] }}"), "True None 1.0 [1, 'a']");
    assert_eq!(render("{{ bos_token }}|{{ eos_token }}|{{ missing }}"), "<s>|</s>|");
    assert_eq!(render("{{ messages[0].content|trim ~ '!' }}"), "Hi!");
    assert_eq!(
        render("{{ messages[1].content is none }} {{ messages[1].name is defined }}"),
        "True False"
    );
    assert_eq!(render("{{ tools is none }} {{ documents is none }}"), "True True");
    assert_eq!(render("{{ messages[0].content is string }}"), "True");
    assert_eq!(
        render(
            "{% for i in range(3, 0, -1) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}"
        ),
        "32"
    );
    assert_eq!(
        render(
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
        ),
        "13"
    );
    assert_eq!(
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages[:1] %}{% set ns.n = ns.n + 1 %}\
             {% endfor %}{{ ns.n }}"
        ),
        "1"
    );
    assert_eq!(
        render("{% macro f(x, y='z') %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(2, y=3) }}"),
        "<1z><23>"
    );
    assert_eq!(
        render("{{ 'a</think>b'.split('</think>')[-1] }}{{ 'x y'.startswith('x') }}"),
        "bTrue"
    );
    assert_eq!(render("{{ 'a.b.c'.split('.', 1)[1] }}"), "b.c");
    assert_eq!(
        render("{{ messages[0].get('name', 'nobody') }} {{ messages[0].get('x') }}"),
        "nobody None"
    );
    assert_eq!(
        render("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}"),
        "a1b2"
    );
    assert_eq!(
        render("{{ ['a', 'b']|join('-') }} {{ 'abc'|length }} {{ x|default('d') }}"),
        "a-b 3 d"
    );
    assert_eq!(render("{{ '<&>' }}"), "<&>");
    assert_eq!(render("{{ strftime_now('%Y')|length }}"), "4");
}

#[test]
fn writes_json_as_python_does() {
    let value = "{'b': 'é<\"', 'a': [1, 2.5, true, none]}";
    let plain = r#"{"b": "é<\"", "a": [1, 2.5, true, null]}"#;
    assert_eq!(render(&format!("{{{{ {value}|tojson }}}}")), plain);
    let compact = r#"{"b":"é<\"","a":[1,2.5,true,null]}"#;
    assert_eq!(render(&format!("{{{{ {value}|tojson(separators=(',', ':')) }}}}")), compact);
    let sorted = r#"{"a": [1, 2.5, true, null], "b": "\u00e9<\""}"#;
    let arguments = "sort_keys=true, ensure_ascii=true";
    assert_eq!(render(&format!("{{{{ {value}|tojson({arguments}) }}}}")), sorted);
    assert_eq!(render("{{ {'a': [1]}|tojson(indent=2) }}"), "{\n  \"a\": [\n    1\n  ]\n}");
    // The order of the caller's keys is kept.
    let tools = json!([{"type": "function", "function": {"name": "f", "a": 1}}]);
    let text = try_render("{{ tools|tojson }}", json!([]), Some(&tools)).unwrap();
    assert_eq!(text, r#"[{"type": "function", "function": {"name": "f", "a": 1}}]"#);
    assert!(try_render("{{ x|tojson }}", json!([]), None).is_err());
    assert!(try_render("{{ 1|tojson(colour=1) }}", json!([]), None).is_err());
}

#[test]
fn lists_can_be_changed_in_place() {
    let source = "{% set names = [] %}{% for m in messages %}{% set _ = names.append(m['role']) %}\
                  {% endfor %}{{ names|join(',') }}";
    assert_eq!(render(source), "user,tool");
    assert_eq!(
        render("{% set x = [1, [2, 3][1]] %}{% set _ = x.insert(0, 9) %}{{ x }}"),
        "[9, 1, 3]"
    );
    assert_eq!(render("{% set x = ['a]', \"b['\"] %}{{ x.pop() }}{{ x|length }}"), "b['1");
    assert_eq!(
        render(
            "{% set x = [1, 2, 3] %}{{ x.pop(0) }}{{ x[:1] }}{% set _ = x.extend([4]) %}{{ x }}"
        ),
        "1[2][2, 3, 4]"
    );
    assert_eq!(render("{% set m = messages.pop() %}{{ m.role }}{{ messages|length }}"), "tool1");
    assert_eq!(
        render(
            "{% set ns = namespace(x=[]) %}{% for i in range(2) %}{% set _ = ns.x.append(i) %}\
             {% endfor %}{{ ns.x }}"
        ),
        "[0, 1]"
    );
    assert_eq!(
        render(
            "{% set x = [] %}{# [no] #}[text]{% set _ = x.append({'a': [1]['x'|length - 1]}) %}\
             {{ x }}"
        ),
        "[text][{'a': 1}]"
    );
    assert_eq!(
        render("{% set x = [] %}{%- raw %}{{ [1] }}{% endraw -%}{% set _ = x.append(1) %}{{ x }}"),
        "{{ [1] }}[1]"
    );
    // A list put into itself is a copy.
    assert_eq!(render("{% set x = [1] %}{% set _ = x.append(x) %}{{ x }}"), "[1, [1]]");
    assert!(try_render("{% set x = [] %}{{ x.pop() }}", json!([]), None).is_err());
    assert!(try_render("{% set x = [] %}{{ x.pop }}{{ x.sort_of() }}", json!([]), None).is_err());
}

#[test]
fn refusals_of_a_template_are_told_in_its_own_words() {
    let source = "{% if messages[0].role != 'system' %}\
                  {{ raise_exception('System first, please.') }}{% endif %}";
    let error = try_render(source, json!([{"role": "user", "content": "x"}]), None).unwrap_err();
    match &error {
        ModelError::TemplateRaised { reason } => assert_eq!(reason, "System first, please."),
        other => panic!("{other}"),
    }
    // Also from within a macro.
    let source = "{% macro f() %}{{ raise_exception('No.') }}{% endmacro %}{{ f() }}";
    let error = try_render(source, json!([]), None).unwrap_err();
    assert!(matches!(error, ModelError::TemplateRaised { .. }), "{error}");
}

#[test]
fn wrong_templates_are_errors() {
    for source in ["{% if %}", "{{ 'a", "{% for x in y %}", "{% nonsense %}", "{{ messages[ }}"] {
        let error = ChatTemplate::from_source(source, None, None).err().unwrap();
        assert!(matches!(error, ModelError::Template { .. }), "{source}: {error}");
    }
    for source in ["{{ missing.attribute }}", "{{ nothing() }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}"] {
        let error = try_render(source, json!([]), None).unwrap_err();
        assert!(matches!(error, ModelError::Template { .. }), "{source}: {error}");
    }
    let deep = "{{ (".to_owned() + &"(".repeat(100_000);
    assert!(ChatTemplate::from_source(&deep, None, None).is_err());
    let long = "x".repeat(5 << 20);
    assert!(ChatTemplate::from_source(&long, None, None).is_err());
}

/// Fuel ends what takes many steps.
#[test]
fn work_without_end_is_an_error() {
    let all = "range(9999)";
    let long = "{% set x = [] %}{% set _ = x.extend(range(9999)) %}";
    let shared = "{% set ns = namespace(x=[[]]) %}{% for a in range(60) %}{% set ns.x = [ns.x, \
                  ns.x] %}{% endfor %}";
    for source in [
        format!("{{% for a in {all} %}}{{% for b in {all} %}}{{% endfor %}}{{% endfor %}}"),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        format!(
            "{{% set ns = namespace(s='x') %}}{{% for a in {all} %}}\
             {{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}"
        ),
        format!(
            "{{% set x = [1] %}}{{% for a in {all} %}}{{% set _ = x.append(x) %}}{{% endfor %}}"
        ),
        format!("{shared}{{{{ ns.x|tojson }}}}"),
        format!("{shared}{{{{ ns.x }}}}"),
        format!(
            "{long}{{% for a in {all} %}}{{% for b in {all} %}}{{% set _ = x.insert(0, 1) %}}\
             {{% set _ = x.pop(0) %}}{{% endfor %}}{{% endfor %}}"
        ),
        format!(
            "{long}{{% for a in {all} %}}{{% for b in {all} %}}{{% for c in x %}}\
             {{% set _ = x.append(1) %}}{{% break %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}"
        ),
        format!(
            "{long}{{% for a in {all} %}}{{% for b in {all} %}}{{% set y = x.count(1) %}}\
             {{% endfor %}}{{% endfor %}}"
        ),
        "{{ 'x' * 10000000000 }}".to_owned(),
        "{{ [[1] * 100000] * 100000 }}".to_owned(),
    ] {
        let error = try_render(&source, json!([]), None).unwrap_err();
        assert!(matches!(error, ModelError::Template { .. }), "{source}: {error}");
    }
}

/// One step that would take forever ends too: comparing lists that share their items.
#[test]
fn one_step_without_end_is_an_error() {
    let source = "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(60) %}{% set ns.x = \
                  [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}";
    let error = try_render(source, json!([]), None).unwrap_err();
    assert!(error.to_string().contains("did not end within"), "{error}");
}

/// Values nested far deeper than a thread's usual stack could compare, print or drop.
#[test]
fn deep_values_do_not_overflow_the_stack() {
    let grow = "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(99999) %}\
                {% set ns.x = [ns.x] %}{% endfor %}";
    assert_eq!(render(&format!("{grow}done")), "done");
    let source = format!("{grow}{{{{ ns.x }}}}");
    let error = try_render(&source, json!([]), None).unwrap_err();
    assert!(error.to_string().contains("nested more than 200 deep"), "{error}");
    let text = format!("{grow}{{{{ ns.x|string|length }}}}");
    let error = try_render(&text, json!([]), None).unwrap_err();
    assert!(error.to_string().contains("nested more than 200 deep"), "{error}");
    let equal = grow.replace("{% endfor %}", "{% set ns.y = [ns.y] %}{% endfor %}");
    assert_eq!(render(&format!("{equal}{{{{ ns.x == ns.y }}}}")), "True");
    // As deep as the fuel allows: literals of many levels cost little a level.
    for levels in [16, 70] {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        let grow = format!(
            "{{% set ns = namespace(x=[1], y=[1]) %}}{{% for a in range(99999) %}}\
             {{% set ns.x = {open}ns.x{close} %}}{{% set ns.y = {open}ns.y{close} %}}\
             {{% if ns.x == ns.y %}}{{% endif %}}{{% endfor %}}"
        );
        // Whether fuel, depth or time ends it, it ends in an error.
        try_render(&grow, json!([]), None).unwrap_err();
        let grow = grow.replace("{% if ns.x == ns.y %}{% endif %}", "");
        try_render(&grow, json!([]), None).unwrap_err();
    }
}

/// Sources that take long to read.
#[test]
fn sources_made_to_take_long_are_read_or_refused() {
    let lists = "{% set x = [] %}{% set _ = x.append(1) %}";
    for source in [
        "{{".repeat(100_000),
        format!("{lists}{}", "{{ 1 }}".repeat(100_000)),
        format!("{}.append(", "{#".repeat(400_000)),
        format!("{}.append(", "{% raw %}".repeat(90_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(300_000)),
        format!("{{{{ 'a'{} }}}}", "|upper".repeat(100_000)),
    ] {
        // Whether it is a template does not matter here, only that this ends.
        if let Ok(template) = ChatTemplate::from_source(&source, None, None) {
            let _ = template.render(&[], None, &options(true));
        }
    }
}

#[test]
fn finds_the_template_of_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let text = |tools: Option<&Value>| {
        let template = ChatTemplate::from_dir(path).unwrap();
        template.render(&[Message::new("user", "x")], tools, &options(false)).unwrap()
    };
    let error = ChatTemplate::from_dir(path).err().unwrap();
    assert!(matches!(error, ModelError::TemplateMissing { .. }), "{error}");
    let write = |name: &str, content: &str| fs::write(path.join(name), content).unwrap();
    let config = |template: Value| {
        let bos = json!({"content": "<b>"});
        json!({"bos_token": bos, "eos_token": "<e>", "chat_template": template})
    };
    write("tokenizer_config.json", &config(json!("{{ bos_token }}{{ eos_token }}")).to_string());
    assert_eq!(text(None), "<b><e>");
    let named = json!([
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}
    ]);
    write("tokenizer_config.json", &config(named).to_string());
    assert_eq!(text(None), "default");
    assert_eq!(text(Some(&json!([]))), "default");
    assert_eq!(text(Some(&json!([{"function": {"name": "f"}}]))), "tools");
    write("chat_template.jinja", "file {{ bos_token }}");
    assert_eq!(text(None), "file <b>");
    fs::remove_file(path.join("chat_template.jinja")).unwrap();
    for wrong in [json!(3), json!([]), json!([{"name": "other", "template": "x"}])] {
        write("tokenizer_config.json", &config(wrong.clone()).to_string());
        let error = ChatTemplate::from_dir(path).err().unwrap().to_string();
        assert!(error.contains("`chat_template`"), "{wrong}: {error}");
    }
    write("tokenizer_config.json", "{");
    assert!(matches!(ChatTemplate::from_dir(path), Err(ModelError::Json { .. })));
}

#[test]
fn callers_add_variables() {
    let template =
        ChatTemplate::from_source("{{ thinking }} {{ bos_token }}", Some("b"), None).unwrap();
    let extra = json!({"thinking": false}).as_object().unwrap().clone();
    let options = ChatOptions { add_generation_prompt: false, extra };
    assert_eq!(template.render(&[], None, &options).unwrap(), "False b");
    let error = template.render(&[], Some(&json!({"a": 1})), &options).unwrap_err();
    assert!(error.to_string().contains("list of functions"), "{error}");
}
